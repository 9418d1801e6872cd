#!/usr/bin/env bash
# One rank: Slurm's names to torch's, and a log of its own.
set -euo pipefail
# shellcheck source=scripts/slurm/common.sh
source "$PNPO_HOME/scripts/slurm/common.sh"

export RANK=$SLURM_PROCID
export LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_NTASKS
local_tasks=${SLURM_STEP_TASKS_PER_NODE:-$SLURM_NTASKS} # "8(x4)"
export LOCAL_WORLD_SIZE=${local_tasks%%[(,]*}
export PYTHONUNBUFFERED=1

# Slurm signals every process of a step. This shell and the log's writer outlive the program, which alone decides when
# to end.
exec > >(trap '' TERM USR1; exec tee -a "$PNPO_LOGS/$(printf 'rank_%03d.log' "$RANK")") 2>&1
writer=$!

command -v pnpo-megatron > /dev/null || fail "no pnpo-megatron on PATH${PNPO_CONTAINER:+ in $PNPO_CONTAINER}: install it there"
if [ "$RANK" = 0 ] && [ "$1" = train ] && folder=$(run_folder "${@:2}" 2>/dev/null); then
    rm -f "$folder/exit_code" # of an earlier start
    echo "$folder" > "$PNPO_LOGS/run_folder"
fi

trap '' TERM USR1
code=0
(trap - TERM USR1; exec pnpo-megatron "$@") || code=$?

exec >&- 2>&-
for _ in {1..10}; do # the last lines; not for ever, since a stray child may hold the pipe
    kill -0 "$writer" 2> /dev/null || break
    sleep 0.1
done
exit "$code"
