"""One training job on one cluster: what decides memory, traffic and time; its memory table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from pnpo_megatron.config import Config
from pnpo_megatron.config.rollouts import GPU_CACHE_BYTES
from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import hf_shapes
from pnpo_megatron.data.partition import Layout, Plan, plan_micro_batches
from pnpo_megatron.errors import ConfigError
from pnpo_megatron.parallel.settings import ParallelSettings, check_layout
from pnpo_megatron.planning import activations as saved
from pnpo_megatron.planning.activations import Modules
from pnpo_megatron.planning.cluster import Cluster
from pnpo_megatron.planning.shards import StateBytes, chunks_of, state_bytes


@dataclass(frozen=True)
class Assumptions:
    """What no configuration says. The first two come from the paper's step times (tests/unit/planning)."""

    mfu: float = 0.432
    """Share of the data sheet's FLOP/s in training, communication not included; plausible: 0.25 to 0.5."""
    decode_share: float = 0.466
    """Share of the data sheet's memory bandwidth while decoding; plausible: 0.3 to 0.8."""
    decode_step_s: float = 0.008
    """Host and launch time of one decoding step, whatever its size; plausible: 0.003 to 0.012."""
    link_share: float = 0.6
    """Share of the links' bandwidth that collectives reach; none is hidden behind computation."""
    mean_response: float | None = None
    """Tokens; None takes 0.4 of the limit. Lengths are limit * u^p, u uniform: the longest reach it."""
    prompt: int = 150
    """Tokens of a prompt."""
    reward_s: float = 3.0
    """Grading that outlasts generation."""
    sync_bytes_s: float = 10e9
    """Weights to the engines, gathered and copied."""
    reserved: float = 4e9
    """Bytes for CUDA contexts, NCCL and fragmentation."""


@dataclass(frozen=True)
class Job:
    """An architecture, a layout and a batch on a cluster."""

    arch: Architecture
    cluster: Cluster
    parallel: ParallelSettings
    modules: Modules
    max_tokens: int
    prompts: int
    group_size: int
    mini_batch: int
    epochs: int
    max_prompt: int
    max_response: int
    distributed: bool = True
    offload: float = 0.0
    """Share of the optimizer's state that lives in host memory."""
    cache_bytes: int = GPU_CACHE_BYTES
    max_num_seqs: int = 256
    scorings: int = 1
    """Passes for log-probs a batch: the policy's, and the first weights' (`objective.kl_coef`)."""
    keeps_gradient: bool = False
    """The first epoch's, in float32 (`run.gradient_cosine`)."""
    servers: int = 0
    """Rollout servers, on GPUs beside the cluster's; 0: engines share the learner's GPUs."""
    assumed: Assumptions = Assumptions()

    @classmethod
    def of(cls, config: Config, arch: Architecture, cluster: Cluster, assumed: Assumptions) -> Job:
        """The job that a configuration describes.

        Raises:
            ConfigError, ConversionError: a layout that fits neither the model nor the GPUs.
        """
        if arch.latent is not None:
            raise ConfigError(f"doctor: {arch.family} has latent attention, whose bytes are not modelled yet")
        job = cls(
            arch=arch,
            cluster=cluster,
            parallel=ParallelSettings(**config.parallel.model_dump()),
            modules=Modules(
                4 if config.model.dtype == "float32" else 2,
                config.model.recompute,
                fused_swiglu=config.model.fused_swiglu is not False,
            ),
            max_tokens=config.batching.max_tokens,
            prompts=config.rollout.prompts,
            group_size=config.rollout.group_size,
            mini_batch=config.objective.mini_batch,
            epochs=config.objective.epochs,
            max_prompt=config.rollout.max_prompt_tokens,
            max_response=config.rollout.max_response_tokens,
            distributed=config.optimizer.distributed,
            offload=config.optimizer.offload,
            cache_bytes=config.rollout.kv_cache_bytes or GPU_CACHE_BYTES,
            max_num_seqs=config.rollout.max_num_seqs,
            scorings=1 + (config.objective.kl_coef > 0),
            keeps_gradient=config.run.gradient_cosine and config.objective.epochs > 1,
            servers=len(config.rollout.servers),
            assumed=assumed,
        )
        check_layout(arch, job.parallel)
        job.parallel.data_size(cluster.gpus)
        return job

    @cached_property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.parallel.data_size(self.cluster.gpus)

    @cached_property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.data * self.parallel.context * self.parallel.tensor // self.parallel.expert

    @cached_property
    def parameters(self) -> int:
        """Of the whole model, as Hugging Face counts them."""
        return sum(prod(shape) for shape in hf_shapes(self.arch).values())

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the responses of one update, at equal steps of the assumed distribution."""
        count, limit = self.mini_batch * self.group_size, self.max_response
        power = limit / min(self.assumed.mean_response or 0.4 * limit, 0.99 * limit) - 1
        return tuple(max(1, round(limit * ((at + 1) / count) ** power)) for at in range(count))

    @cached_property
    def plan(self) -> Plan:
        """The micro-batches of one update."""
        layout = Layout(
            self.max_tokens,
            self.data,
            self.parallel.context,
            self.parallel.tensor,
            self.parallel.pipeline if self.parallel.virtual_pipeline > 1 else 1,
        )
        return _planned(tuple(n + self.assumed.prompt for n in self.lengths), layout)

    @property
    def micro_batches(self) -> int:
        """Of one update on each rank."""
        return len(self.plan[0])

    @property
    def bubble(self) -> float:
        """Share of an update in which a pipeline stage waits."""
        idle = (self.parallel.pipeline - 1) / self.parallel.virtual_pipeline
        return idle / (self.micro_batches + idle)

    @cached_property
    def engine_tensor(self) -> int:
        """GPUs of one engine: the fewest (a power of 2) whose memory the weights fill to a third at most."""
        size = 1
        while 2 * self.parameters / size > self.cluster.memory / 3 and size < self.cluster.gpus:
            size *= 2
        return size

    def state(self, stage: int) -> StateBytes:
        """Weights, gradients and optimizer state of a rank of one pipeline stage."""
        return state_bytes(
            chunks_of(self.arch, self.parallel, stage),
            itemsize=self.modules.itemsize,
            distributed=self.distributed,
            data=self.data * self.parallel.context,
            expert_data=self.expert_data,
        )

    def memory(self) -> dict[str, float]:
        """Bytes by part on the fullest GPU; an engine that shares it moves nothing away."""
        return max(
            (self._memory(stage) for stage in range(self.parallel.pipeline)), key=lambda m: sum(m.values())
        )

    def _memory(self, stage: int) -> dict[str, float]:
        state, last = self.state(stage), stage == self.parallel.pipeline - 1
        layers = sum(chunk.layers for chunk in chunks_of(self.arch, self.parallel, stage))
        held = saved.saved_bytes(
            self.arch, self.parallel, self.modules, tokens=self.max_tokens, layers=layers, last=last
        )
        working = saved.working_bytes(self.arch, self.parallel, self.modules, tokens=self.max_tokens)
        shards = self.data * self.parallel.context
        engine = {
            "vLLM weights": 2 * self.parameters / self.engine_tensor,
            "vLLM cache": float(self.cache_bytes),
        }
        return {
            "weights": state.weights,
            "gradients": state.gradients * (1 + self.keeps_gradient / (shards if self.distributed else 1)),
            "optimizer": state.optimizer * (1 - self.offload),
            "activations": held * saved.in_flight(self.parallel, stage, self.micro_batches) + working,
            "logits": saved.logits_bytes(self.arch, self.parallel, tokens=self.max_tokens) if last else 0.0,
            **({} if self.servers else engine),
            "reserved": self.assumed.reserved,
        }

    @property
    def fits(self) -> bool:
        """Whether the fullest GPU holds its parts."""
        return sum(self.memory().values()) <= self.cluster.memory

    def with_layout(self, parallel: ParallelSettings, recompute: str) -> Job:
        """The same job split differently; micro-batches stay as small as a whole sequence allows."""
        multiple = 2 * parallel.context * parallel.tensor
        longest = -(-(self.max_prompt + self.max_response) // multiple) * multiple // parallel.context
        return replace(
            self, parallel=parallel, modules=replace(self.modules, recompute=recompute), max_tokens=longest
        )


_planned = lru_cache(maxsize=256)(plan_micro_batches)
