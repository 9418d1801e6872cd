"""A real Slurm on this machine: munge, one controller and four nodes, in one folder, gone when it is closed.

The nodes pretend to have the CPUs and GPUs that the batch scripts ask for; nothing is bound to them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo", "squeue")
NODES = ("n1", "n2", "n3", "n4")
"""As many as the documented example asks for; jobs that run take the first two."""
START_S = 30.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> str:
    """Why no Slurm can be started here; empty if one can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class LocalSlurm:
    """``with LocalSlurm(folder) as slurm:``; nothing of it outlives the block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            "PATH": search_path(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "HOME": str(folder),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> LocalSlurm:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        controller, *ports = free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            "CPUs=64 RealMemory=1000000 Gres=gpu:8"
            for name, port in zip(NODES, ports, strict=True)
        )
        text = CONFIG.format(host=host, controller=controller, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        for number in range(8):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        files = {"socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        # --force: the folders above ours may be writable by others, which munged would refuse.
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.wait((self.folder / "munge.socket").exists, "munged's socket", START_S)
        self._daemon("slurmctld", "-D", "-i")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        idle = ("sinfo", "-h", "-t", "idle", "-o", "%D")
        self.wait(lambda: self.command(*idle, check=False) == str(len(NODES)), "idle nodes", START_S)

    def _daemon(self, *command: str) -> None:
        with (self.folder / "daemons.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                )
            )

    def wait(
        self, condition: Callable[[], bool], what: str, timeout_s: float, logs: Iterable[Path] = ()
    ) -> None:
        """Until `condition` holds; fails with the ends of all logs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                ends = [f"{path}:\n{path.read_text(errors='replace')[-3000:]}"
                        for path in (*self.folder.glob("*.log"), *logs) if path.is_file()]  # fmt: skip
                raise AssertionError(f"no {what} within {timeout_s:.0f} s\n" + "\n".join(ends))
            time.sleep(0.1)

    def command(self, *command: str, check: bool = True, **environment: str) -> str:
        """Output of one of Slurm's commands."""
        result = subprocess.run(
            command,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout.strip()

    def submit(
        self, script: str, *arguments: str, folder: Path, options: Iterable[str] = (), **environment: str
    ) -> Job:
        """A batch script on both nodes, one rank each, no GPUs, submitted from `folder`."""
        log = folder / "job.log"
        number = self.command(
            "sbatch", "--parsable", "--nodes=2", "--nodelist=n1,n2", "--ntasks-per-node=1",
            "--cpus-per-task=1", "--gpus-per-node=0", f"--chdir={folder}", f"--output={log}", *options,
            str(ROOT / "scripts" / "slurm" / script), *arguments, PNPO_HOME=str(folder), **environment,
        )  # fmt: skip
        return Job(self, number, log)

    def close(self) -> None:
        """Cancel what runs, end the daemons, and kill what is left of their jobs."""
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        for pid in processes_with(f"SLURM_CONF={self.folder / 'slurm.conf'}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Job:
    """One submitted job."""

    slurm: LocalSlurm
    number: str
    output: Path

    def field(self, name: str) -> str:
        """One value of `scontrol show job`."""
        words = self.slurm.command("scontrol", "show", "job", "-o", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)[name]

    def state(self) -> str:
        return self.field("JobState")

    def log(self) -> str:
        """What the job has printed so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        self.slurm.wait(condition, what, timeout_s, [self.output])

    def start_soon(self) -> None:
        """Slurm lets a requeued job wait for two minutes; a test does not.

        Within a second or so of the requeue a node would still take the new start for the cancelled one.
        """
        self.slurm.command("scontrol", "update", f"JobId={self.number}", "StartTime=now+3")

    def processes(self) -> list[int]:
        """Live processes of this job, on both nodes."""
        ours = set(processes_with(f"SLURM_CONF={self.slurm.folder / 'slurm.conf'}"))
        return sorted(ours & set(processes_with(f"SLURM_JOB_ID={self.number}")))


def processes_with(setting: str) -> list[int]:
    """Live processes with NAME=VALUE in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or it is a zombie
            if setting.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
