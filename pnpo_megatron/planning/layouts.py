"""Layouts that fit, fastest first, for a job that does not."""

from collections.abc import Iterator

from pnpo_megatron.errors import UserError
from pnpo_megatron.parallel.settings import ParallelSettings, check_layout
from pnpo_megatron.planning.job import Job
from pnpo_megatron.planning.step_time import predict

_POWERS = (1, 2, 4, 8, 16, 32, 64)


def better_layouts(job: Job, count: int = 3) -> list[tuple[Job, float]]:
    """The fastest layouts that fit, with their predicted seconds a step."""
    found = [(one, predict(one).total) for one in candidates(job) if one.fits]
    return sorted(found, key=lambda pair: pair[1])[:count]


def candidates(job: Job) -> Iterator[Job]:
    """Every layout in powers of two that this program accepts; tensor parallelism stays inside a node."""
    node = job.cluster.gpus_a_node
    for tensor in (size for size in _POWERS if size <= node):
        for pipeline in (size for size in _POWERS if size <= job.arch.layers):
            for context in (size for size in _POWERS if size * tensor <= 2 * node):
                for expert in _POWERS if job.arch.experts else (1,):
                    parallel = ParallelSettings(tensor, pipeline, 1, context, expert, tensor > 1)
                    try:
                        check_layout(job.arch, parallel)
                        parallel.data_size(job.cluster.gpus)
                    except UserError:
                        continue
                    for recompute in ("none", "full"):
                        yield job.with_layout(parallel, recompute)
