"""Entry of the worker process: ``python -m pnpo_megatron.rollout.worker_main CONTROL WEIGHTS LIFELINE PID``.

Ties the process to its trainer first and imports what is heavy after that: the engine takes seconds.
"""

import ctypes
import gc
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1
NOT_FOR_US = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Slurm sends these to every process of a job; the trainer decides when the engine ends."""


def die_with_parent(lifeline: int, parent: int) -> None:
    """End this process and all that it started when the trainer ends, however it ends.

    The kernel's signal covers this process; the pipe also covers a trainer that was gone already, a
    starting thread that ended before the trainer, and the engine's own children.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        os.read(lifeline, 1)  # returns at the end of the file only: nothing is ever written
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(argv: list[str]) -> int:
    """Run the worker on inherited descriptors and the trainer's pid; its exit code."""
    control, weights, lifeline, parent = (int(value) for value in argv)
    for descriptor in (control, weights, lifeline):
        os.set_inheritable(descriptor, False)
    die_with_parent(lifeline, parent)
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # importing makes objects and hardly any garbage; `build_engine` turns it on
    from pnpo_megatron.rollout.vllm_worker import run

    return run(control, weights)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that vLLM leaves running would hold up an ordinary exit
