# shellcheck shell=bash
# Sourced by the batch scripts: rendezvous, launch, exit codes. What is trained stays in the TOML.

fail() {
    echo "error: $1" >&2
    exit "${2:-2}"
}

# The environment that `make setup` or requirements/gpu.txt made; PNPO_VENV names another one.
activate_environment() {
    local venv=${PNPO_VENV:-.venv}
    [ -r "$venv/bin/activate" ] || fail "$venv/bin/activate not found: follow requirements/gpu.txt, or set PNPO_VENV"
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

# MASTER_ADDR is the job's first node, MASTER_PORT differs between jobs that share a node.
set_rendezvous() {
    local hosts
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol cannot list the nodes of this job" 1
    export MASTER_ADDR=${hosts%%$'\n'*}
    export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
}

# The run folder of `train CONFIG.toml [--run.folder=...]`: the last override, else the file, else the default.
run_folder() {
    python - "$@" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    folder = tomllib.load(file).get("run", {}).get("folder", "runs/pnpo")
key = "--run.folder="
print(([argument[len(key):] for argument in sys.argv[2:] if argument.startswith(key)] or [folder])[-1])
PYTHON
}

# One task a GPU, and every rank sees all devices of its node. A rank that fails ends the others.
launch() {
    [ -z "${SLURM_GPUS_PER_TASK:-}" ] || fail "--gpus-per-task hides the GPUs beside a rank from its rollout replica; \
use --gpus-per-node"
    srun --kill-on-bad-exit=1 --wait=60 --label "$PNPO_HOME/scripts/slurm/task.sh" "$@"
}

# srun reports the highest code of all tasks, and a task killed because another one failed counts as one: what the run
# itself wrote is better, if it is from this start.
final_exit_code() { # SRUN_CODE FOLDER STARTED_S
    local file=$2/exit_code
    if [ "$1" -ne 0 ] && [ -s "$file" ] && [ "$(stat -c %Y "$file")" -ge "$3" ]; then
        cat "$file"
    else
        echo "$1"
    fi
}
