#!/usr/bin/env bash
# One rank: Slurm's names to torch's, then the program itself. It replaces this shell, so that signals reach it.
set -euo pipefail
export RANK=$SLURM_PROCID
export LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-$SLURM_NTASKS}
exec pnpo-megatron "$@"
