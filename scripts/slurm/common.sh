# shellcheck shell=bash
# Sourced by the batch scripts: environment, rendezvous, launch, exit codes. What is trained stays in the TOML; what is
# the cluster's is set here, from outside (docs/operations.md, "Slurm"):
#   PNPO_VENV             virtual environment (default .venv)
#   PNPO_SITE             file to source first: modules, NCCL_* and proxies of this cluster
#   PNPO_CONTAINER        image for pyxis, with pnpo-megatron on its PATH; PNPO_MOUNTS adds SOURCE:TARGET,...
#   PNPO_LOGS             folder of the per-rank logs (default slurm-logs/NAME-JOB.RESTART), seen by every node
#   PNPO_MAX_RESTARTS     how often a job may go back into the queue (default 20)
#   PNPO_REQUEUE_CODES    exit codes after which it does (default 75; "75 1 137" survives bad nodes too)
#   PNPO_GRACE_S          seconds from the first failed rank to the end of all (default 15)
#   PNPO_ROLLOUT_NODES    the last N nodes of a training job sample, and do nothing else (default 0: rank 0's GPU does)
#   PNPO_SERVERS_PER_NODE servers on each of those; they share its GPUs evenly (default 1)
TRAIN_OPTIONS=() TRAIN_FLAGS=() # set by start_servers

fail() {
    echo "error: $1" >&2
    exit "${2:-2}"
}

# Where the scripts are: Slurm runs a copy of the batch script, whose own path says nothing.
enter_home() {
    PNPO_HOME=${PNPO_HOME:-${SLURM_SUBMIT_DIR:-$PWD}}
    export PNPO_HOME
    cd "$PNPO_HOME" || exit 2
}

# The environment that `make setup` or requirements/gpu.txt made; a container brings its own.
activate_environment() {
    local venv=${PNPO_VENV:-.venv}
    if [ -n "${PNPO_SITE:-}" ]; then
        [ -r "$PNPO_SITE" ] || fail "PNPO_SITE = $PNPO_SITE: no such file"
        # shellcheck disable=SC1090
        source "$PNPO_SITE"
    fi
    [ -z "${PNPO_CONTAINER:-}" ] || return 0
    [ -r "$venv/bin/activate" ] || fail "$venv/bin/activate not found: follow requirements/gpu.txt, or set PNPO_VENV"
    # shellcheck disable=SC1091
    source "$venv/bin/activate"
}

# MASTER_PORT differs between jobs that share a node and stays below the ports that the kernel hands out.
set_rendezvous() {
    local hosts first
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol cannot list the nodes of this job" 1
    first=${hosts%%$'\n'*}
    [ -n "$first" ] || fail "scontrol lists no node for $SLURM_JOB_NODELIST" 1
    MASTER_ADDR=$(node_address "$first")
    export MASTER_ADDR
    export MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
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

# start_servers CONFIG.toml ...: with PNPO_ROLLOUT_NODES, a step of `pnpo-megatron serve` on the last nodes. The servers end
# with the job. Sets TRAIN_OPTIONS (srun's) and TRAIN_FLAGS (the trainer's).
start_servers() {
    local count=${PNPO_ROLLOUT_NODES:-0} hosts rollout urls=() flags=() host index word
    local port=$((MASTER_PORT + 1))
    export PNPO_SERVERS_PER_NODE=${PNPO_SERVERS_PER_NODE:-1}
    [ "$count" -gt 0 ] || return 0
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    local left=$((${#hosts[@]} - count))
    [ "$left" -gt 0 ] || fail "PNPO_ROLLOUT_NODES = $count of ${#hosts[@]} nodes: at least one has to train"
    rollout=("${hosts[@]:left}")
    for host in "${rollout[@]}"; do
        for ((index = 0; index < PNPO_SERVERS_PER_NODE; index++)); do
            urls+=("http://$(node_address "$host"):$((port++))")
        done
    done
    for word in "${@:2}"; do # train's own flags mean nothing to a server
        [[ $word != --*.*=* ]] || flags+=("$word")
    done
    PNPO_SERVERS=$(join "${urls[@]}")
    export PNPO_SERVERS
    TRAIN_OPTIONS=("--nodes=$left" "--ntasks=$((left * SLURM_NTASKS_PER_NODE))" "--nodelist=$(join "${hosts[@]:0:left}")")
    TRAIN_FLAGS=("--rollout.engine=server" "--rollout.servers=$PNPO_SERVERS")
    set_logs
    step_options
    srun --job-name=serve --nodes="$count" --ntasks=$((count * PNPO_SERVERS_PER_NODE)) --nodelist="$(join "${rollout[@]}")" \
        --ntasks-per-node="$PNPO_SERVERS_PER_NODE" --kill-on-bad-exit=0 "${STEP_OPTIONS[@]}" \
        "$PNPO_HOME/scripts/slurm/serve.sh" "$1" "${flags[@]}" < /dev/null &
}

join() {
    local IFS=,
    echo "$*"
}

# Where Slurm itself reaches a node: its name need not resolve.
node_address() { # NODE
    local address
    address=$(scontrol show node -o "$1" | grep -o 'NodeAddr=[^ ]*') || address=$1
    echo "${address#NodeAddr=}"
}

set_logs() {
    PNPO_LOGS=${PNPO_LOGS:-$PNPO_HOME/slurm-logs/${SLURM_JOB_NAME:-job}-$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}}
    export PNPO_LOGS
    mkdir -p "$PNPO_LOGS" || fail "PNPO_LOGS = $PNPO_LOGS: cannot be made"
}

step_options() {
    STEP_OPTIONS=()
    # Since Slurm 22.05 srun does not take this over from sbatch.
    [ -z "${SLURM_CPUS_PER_TASK:-}" ] || STEP_OPTIONS+=("--cpus-per-task=$SLURM_CPUS_PER_TASK")
    if [ -n "${PNPO_CONTAINER:-}" ]; then
        STEP_OPTIONS+=("--container-image=$PNPO_CONTAINER" "--container-workdir=$PNPO_HOME")
        STEP_OPTIONS+=("--container-mounts=$PNPO_HOME:$PNPO_HOME,$PNPO_LOGS:$PNPO_LOGS${PNPO_MOUNTS:+,$PNPO_MOUNTS}")
    fi
}

# launch COMMAND ...: one task a GPU runs `pnpo-megatron COMMAND ...`, and every rank sees all devices of its node.
# A rank that fails ends the others: they have PNPO_GRACE_S to say so themselves, then they are killed from here. srun's
# own --kill-on-bad-exit sends TERM, which a training rank takes as "save and stop", then blocks for KillWait (30 s).
launch() {
    local code=0
    [ -z "${SLURM_GPUS_PER_TASK:-}" ] || fail "--gpus-per-task hides the GPUs beside a rank from its rollout replica; \
use --gpus-per-node"
    set_logs
    rm -f "$PNPO_LOGS/run_folder"
    SRUN_ERRORS=$(mktemp) # on this node: other nodes' files on a shared disk may be seen late
    step_options
    trap '' TERM USR1 # they are for the ranks; this shell stays until those have saved
    (
        trap - TERM USR1
        exec srun --job-name="$1" --kill-on-bad-exit=0 --wait=60 --label "${STEP_OPTIONS[@]}" "${TRAIN_OPTIONS[@]}" \
            "$PNPO_HOME/scripts/slurm/task.sh" "$@" "${TRAIN_FLAGS[@]}"
    ) < /dev/null 2> >(tee "$SRUN_ERRORS" >&2) &
    local step=$! deadline=""
    while kill -0 "$step" 2> /dev/null; do
        sleep 0.5
        if [ -z "$deadline" ]; then
            [ -z "$(first_failure)" ] || deadline=$((SECONDS + ${PNPO_GRACE_S:-15}))
        elif [ "$SECONDS" -ge "$deadline" ]; then
            scancel --signal=KILL "$SLURM_JOB_ID.$(running_step "$1")" || true
            deadline=$((SECONDS + 10)) # again, should it have failed
        fi
    done
    wait "$step" || code=$?
    return "$code"
}

# srun's line about the first task that did not end well: "srun: error: NODE: task RANK: Exited with exit code 7".
# The ranks' own stderr does not come here.
first_failure() {
    grep -m1 -E '^srun: error: [^ ]+: tasks? [0-9]' "$SRUN_ERRORS" || true
}

running_step() { # NAME
    squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format='%i %j' | sed -n "s/^ *[0-9]*\.\([0-9]*\) $1 *\$/\1/p"
}

# The job's code from srun's. srun reports the highest code of all tasks, and one that was killed because another failed
# counts: a run that wrote 75 is whole, and else the rank that failed first speaks for all.
final_exit_code() { # SRUN_CODE
    local code=$1 first written="" rank
    [ ! -s "$PNPO_LOGS/run_folder" ] || written=$(cat "$(cat "$PNPO_LOGS/run_folder")/exit_code" 2> /dev/null) || true
    first=$(first_failure)
    rm -f "$SRUN_ERRORS"
    if [ "$code" -ne 0 ] && [ "$written" = 75 ]; then
        code=75
    elif [ "$code" -ne 0 ] && [ -n "$first" ]; then
        [[ $first =~ exit\ code\ ([0-9]+) ]] && code=${BASH_REMATCH[1]}
        [[ $first =~ tasks?\ ([0-9]+) ]] && rank=$(printf 'rank_%03d.log' "${BASH_REMATCH[1]}")
        if [ "$code" -ne 75 ]; then
            echo "the first to end: ${first#srun: error: }; last lines of $PNPO_LOGS/$rank:" >&2
            tail -n 20 "$PNPO_LOGS/$rank" >&2 || true
        fi
    fi
    echo "$code"
}

# Back into the queue, unless the job was cancelled or has been there often enough. Does not return.
finish_or_requeue() { # CODE
    case " ${PNPO_REQUEUE_CODES:-75} " in
    *" $1 "*) ;;
    *) exit "$1" ;;
    esac
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "${PNPO_MAX_RESTARTS:-20}" ]; then
        fail "ended with $1 after ${SLURM_RESTART_COUNT} restarts; submit again to go on" "$1"
    fi
    # After `scancel JOB` the person wants it gone.
    scontrol show job -o "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING' || exit "$1"
    echo "ended with $1: job $SLURM_JOB_ID goes back into the queue and resumes from its newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" || fail "this cluster refused to requeue; submit again to go on" "$1"
    exit "$1"
}
