"""Predicted seconds of a step: rooflines with stated constants, to compare layouts, not to promise."""

import heapq
from dataclasses import dataclass

from pnpo_megatron.planning.job import Job
from pnpo_megatron.planning.shards import chunks_of
from pnpo_megatron.planning.traffic import Transfer, crossing_bytes, micro_batch_traffic, update_traffic


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    generate: float
    reward: float
    logprobs: float
    update: float
    """All K epochs."""
    sync: float
    one_engine: float
    """What generation would take with a single engine."""

    @property
    def total(self) -> float:
        """Without overlap."""
        return self.generate + self.reward + self.logprobs + self.update + self.sync


def predict(job: Job) -> StepTime:
    """A step of `job`, phase after phase."""
    compute, traffic = _update_compute(job), _update_traffic(job)
    updates = job.prompts // job.mini_batch
    forward = compute / (4 if job.modules.recompute == "full" else 3)
    engines = job.servers or max(1, job.cluster.gpus // job.engine_tensor)
    return StepTime(
        generate=_generate(job, engines),
        reward=job.assumed.reward_s,
        logprobs=job.scorings * updates * (forward + sum(_seconds(job, traffic, backward=False).values())),
        update=job.epochs * updates * (compute + sum(_seconds(job, traffic).values())),
        sync=2 * job.parameters / job.assumed.sync_bytes_s,
        one_engine=_generate(job, 1),
    )


def traffic_table(job: Job) -> dict[str, tuple[float, float]]:
    """Group -> (bytes that leave the busiest kind of rank in one update, seconds of them)."""
    traffic = _update_traffic(job)
    seconds = _seconds(job, traffic)
    return {
        group: (crossing_bytes(traffic, group, ranks), seconds[group])
        for group, ranks in _sizes(job).items()
        if ranks > 1
    }


def active_parameters(job: Job) -> float:
    """Parameters in the matrix products of one token, head included, embedding not."""
    arch = job.arch
    table = arch.vocab * arch.hidden
    rest = job.parameters - table * (1 if arch.tied else 2)
    if arch.experts:
        idle = arch.experts.count - arch.experts.per_token
        rest -= arch.layers * idle * 3 * arch.hidden * arch.experts.ffn
    return rest + table


def train_flops(job: Job) -> float:
    """Forward and backward of one update; full recomputation adds a third."""
    arch, prompt = job.arch, job.assumed.prompt
    tokens = sum(job.lengths) + prompt * len(job.lengths)
    squares = sum((n + prompt) ** 2 for n in job.lengths)
    attention = 2 * arch.layers * arch.heads * arch.head_dim * squares  # causal: half of 4 n^2 a dimension
    flops = 3 * (2 * active_parameters(job) * tokens + attention)
    return flops * (4 / 3 if job.modules.recompute == "full" else 1)


def _update_compute(job: Job) -> float:
    """Seconds of matrix products, uneven ranks and waiting stages included."""
    loads = [sum(job.lengths[row] + job.assumed.prompt for rows in rank for row in rows) for rank in job.plan]
    uneven = max(loads) * len(loads) / sum(loads)
    rate = job.cluster.gpus * job.cluster.tflops * 1e12 * job.assumed.mfu
    return train_flops(job) / rate * uneven / (1 - job.bubble)


def _update_traffic(job: Job) -> list[Transfer]:
    """What a rank of the first stage hands over in one update (the head's share added where it is alone)."""
    chunks = chunks_of(job.arch, job.parallel, 0)
    rows = job.plan[0]
    tokens = sum(job.lengths[row] + job.assumed.prompt for one in rows for row in one) // job.parallel.context
    scored = sum(job.lengths[row] for one in rows for row in one) // job.parallel.context
    layers = sum(chunk.layers for chunk in chunks)
    passes = micro_batch_traffic(
        job.arch,
        job.parallel,
        tokens=tokens,
        scored=scored,
        layers=layers,
        itemsize=job.modules.itemsize,
        last=job.parallel.pipeline == 1,
        recompute=job.modules.recompute == "full",
    )
    once = update_traffic(
        job.arch,
        job.parallel,
        chunks,
        itemsize=job.modules.itemsize,
        distributed=job.distributed,
        data=job.data * job.parallel.context,
        expert_data=job.expert_data,
    )
    return passes + once


def _sizes(job: Job) -> dict[str, int]:
    parallel = job.parallel
    return {
        "tp": parallel.tensor,
        "cp": parallel.context,
        "ep": parallel.expert,
        "pp": parallel.pipeline,
        "dp": job.data * parallel.context,
        "edp": job.expert_data if parallel.expert > 1 or parallel.tensor > 1 and job.arch.experts else 1,
    }


def _seconds(job: Job, traffic: list[Transfer], *, backward: bool = True) -> dict[str, float]:
    """Megatron's order of ranks: tensor, context, data, pipeline; a group's span decides on its link."""
    span = {
        "tp": job.parallel.tensor,
        "cp": job.parallel.tensor * job.parallel.context,
        "ep": max(job.parallel.expert, job.parallel.tensor),
        "pp": job.cluster.gpus,
        "dp": job.cluster.gpus // job.parallel.pipeline,
        "edp": job.cluster.gpus // job.parallel.pipeline,
    }
    return {
        group: crossing_bytes(traffic, group, ranks, backward=backward)
        / (job.cluster.link(span[group]) * job.assumed.link_share)
        for group, ranks in _sizes(job).items()
        if ranks > 1 and (backward or group not in ("dp", "edp"))
    }


def _generate(job: Job, engines: int) -> float:
    """Decoding with continuous batching: a step reads the weights and every running sequence's cache."""
    arch, cluster, assumed = job.arch, job.cluster, job.assumed
    size = job.engine_tensor
    count = -(-job.prompts * job.group_size // engines)
    lengths = [job.lengths[(at + 1) * len(job.lengths) // count - 1] for at in range(count)]
    cache_token = 4 * arch.layers * arch.head_dim * max(1.0, arch.kv_heads / size)  # bfloat16 keys and values
    mean = sum(lengths) / count
    room = int(job.cache_bytes / (cache_token * (mean / 2 + assumed.prompt)))
    running = max(1, min(job.max_num_seqs, count, room))
    steps = _makespan(lengths, running)
    bandwidth = cluster.memory_tb_s * 1e12 * assumed.decode_share
    weights = steps * _weights_read(job, sum(lengths) / steps) / size
    caches = cache_token * sum(n * n / 2 + n * assumed.prompt for n in lengths)
    tokens = sum(lengths) + count * assumed.prompt
    products = 2 * active_parameters(job) * tokens / (size * cluster.tflops * 1e12 * assumed.mfu)
    return steps * assumed.decode_step_s + max((weights + caches) / bandwidth, products)


def _weights_read(job: Job, sequences: float) -> float:
    """Bytes of weights that a decoding step touches; of experts, those that some sequence was sent to."""
    arch = job.arch
    if arch.experts is None:
        return 2 * active_parameters(job)
    one = 3 * arch.hidden * arch.experts.ffn * arch.layers
    rest = active_parameters(job) - one * arch.experts.per_token
    touched = 1 - (1 - arch.experts.per_token / arch.experts.count) ** sequences
    return 2 * (rest + one * arch.experts.count * touched)


def _makespan(lengths: list[int], running: int) -> int:
    """Decoding steps until all are done, `running` at a time, longest prompts not known beforehand."""
    slots = [0] * running
    for at in range(len(lengths)):
        heapq.heapreplace(slots, slots[0] + lengths[at * 7919 % len(lengths)])
    return max(slots)
