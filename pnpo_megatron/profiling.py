"""``train --profile STEP``: a trace of one step, and a table of where it goes."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pnpo_megatron.loop import Metrics, Parts
from pnpo_megatron.types import RolloutBatch

_PHASES = ("collect", "log_probs", "compare", "update", "sync")
_ROWS = 25


@dataclass
class StepProfile:
    """Profiles this rank from the start of a step to the end of its weight sync. Not collective."""

    step: int
    folder: Path
    rank: int
    _running: Any = field(default=None, init=False)

    def around(self, parts: Parts) -> Parts:
        """The same parts, with the phases of the step named in the trace."""

        def collect(step: int) -> tuple[RolloutBatch, Metrics]:
            if step == self.step:
                cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
                self._running = profile(activities=[ProfilerActivity.CPU, *cuda])
                self._running.start()
            with record_function("pnpo/collect"):
                return parts.collect(step)

        def sync(step: int) -> Metrics:
            with record_function("pnpo/sync"):
                metrics = parts.sync(step)
            if step == self.step and self._running is not None:
                self._running.stop()
                self._write()
            return metrics

        compare = record_function("pnpo/compare")(parts.compare)
        return replace(parts, learner=_Named(parts.learner), collect=collect, compare=compare, sync=sync)

    def _write(self) -> None:
        """RUN/profile/step_NNNNNN_rank_R.json.gz (chrome://tracing, Perfetto) and the table beside it."""
        target = self.folder / "profile" / f"step_{self.step:06d}_rank_{self.rank}"
        target.parent.mkdir(parents=True, exist_ok=True)
        self._running.export_chrome_trace(f"{target}.json.gz")
        table = step_table(self._running.key_averages())
        Path(f"{target}.txt").write_text(table, encoding="utf-8")
        if self.rank == 0:
            print(table)


def step_table(averages: Any) -> str:
    """Phases with their share of the step, then the operations with most time of their own."""
    named = (one for one in averages if one.key.startswith("pnpo/"))
    # A GPU's trace has each phase a second time, without CPU time: the last of a name stays.
    phases = {one.key.removeprefix("pnpo/"): one for one in sorted(named, key=lambda one: one.cpu_time_total)}
    whole = sum(phases[name].cpu_time_total for name in _PHASES if name in phases)
    lines = ["phase           calls     seconds   share"]
    for name in (one for one in _PHASES if one in phases):
        one = phases[name]
        lines.append(
            f"{name:12} {one.count:>8} {one.cpu_time_total / 1e6:>11.3f}  {one.cpu_time_total / whole:>6.1%}"
        )
    lines.append("\noperation                                          calls  self CPU (s)  self GPU (s)")

    def own(one: Any) -> float:
        return float(max(one.self_device_time_total, one.self_cpu_time_total))

    operations = [one for one in averages if not one.key.startswith("pnpo/")]
    for one in sorted(operations, key=own, reverse=True)[:_ROWS]:
        lines.append(
            f"{one.key[:48]:48} {one.count:>7} {one.self_cpu_time_total / 1e6:>13.3f} "
            f"{one.self_device_time_total / 1e6:>13.3f}"
        )
    return "\n".join(lines) + "\n"


class _Named:
    """A learner whose scoring and updates are named in the trace."""

    def __init__(self, learner: Any) -> None:
        self._learner = learner
        self.log_probs = record_function("pnpo/log_probs")(learner.log_probs)
        self.update = record_function("pnpo/update")(learner.update)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)
