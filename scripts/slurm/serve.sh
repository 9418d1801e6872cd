#!/usr/bin/env bash
# One rollout server: its address among PNPO_SERVERS, its share of the node's GPUs, and a log of its own.
set -euo pipefail
# shellcheck source=scripts/slurm/common.sh
source "$PNPO_HOME/scripts/slurm/common.sh"

exec >> "$PNPO_LOGS/$(printf 'server_%03d.log' "$SLURM_PROCID")" 2>&1
IFS=, read -ra servers <<< "$PNPO_SERVERS"
address=${servers[$SLURM_PROCID]#http://}
vllm=()
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
    share=$((${#gpus[@]} / PNPO_SERVERS_PER_NODE))
    [ "$share" -gt 0 ] || fail "PNPO_SERVERS_PER_NODE = $PNPO_SERVERS_PER_NODE: a node has ${#gpus[@]} GPUs"
    CUDA_VISIBLE_DEVICES=$(join "${gpus[@]:SLURM_LOCALID * share:share}")
    export CUDA_VISIBLE_DEVICES
    vllm+=(--tensor-parallel-size "$share")
fi
trap '' USR1 # the warning before the time limit is the trainer's
exec pnpo-megatron serve "$@" --host "${address%:*}" --port "${address##*:}" -- "${vllm[@]}"
