"""Sizes of the parallel dimensions, and which of them an architecture can be trained under: plain numbers."""

import math
from dataclasses import dataclass

from pnpo_megatron.convert.architecture import Architecture
from pnpo_megatron.convert.families import check_tensor_parallel
from pnpo_megatron.errors import ConfigError

# Megatron's own default; the same for all usual tensor-parallel sizes, so checkpoints fit each other.
_VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class ParallelSettings:
    """Sizes of the parallel dimensions; data parallelism takes what is left of the ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    sequence: bool = False
    """Norms and residuals hold 1/tensor of the tokens each."""

    def data_size(self, world_size: int) -> int:
        """Data-parallel size on ``world_size`` ranks.

        Raises:
            ConfigError: the sizes do not fit the ranks or each other.
        """
        model = self.tensor * self.pipeline * self.context
        if world_size % model:
            raise ConfigError(
                f"parallel.tensor x pipeline x context = {self.tensor} x {self.pipeline} x {self.context} = "
                f"{model} does not divide the {world_size} ranks started; start a multiple of {model} ranks"
            )
        data = world_size // model
        if (data * self.context * self.tensor) % self.expert:
            raise ConfigError(
                f"parallel.expert = {self.expert} does not divide tensor x context x data = "
                f"{data * self.context * self.tensor} ranks; use a divisor of that"
            )
        return data


def padded_vocab_size(vocab: int, tensor_parallel: int) -> int:
    """The vocabulary rounded up so that every tensor-parallel rank holds the same number of rows."""
    multiple = math.lcm(_VOCAB_MULTIPLE, tensor_parallel)
    return -(-vocab // multiple) * multiple


def stage_layout(layers: int, pipeline: int, virtual: int) -> list[list[str]] | None:
    """Which layers each (virtual) stage holds, or None where Megatron's own even split does.

    Otherwise the first and last stages, which also hold the tables, get the fewer layers.

    Raises:
        ConfigError: fewer layers than stages.
    """
    stages = pipeline * virtual
    if stages > layers:
        raise ConfigError(
            f"parallel.pipeline x virtual_pipeline = {pipeline} x {virtual} = {stages} stages for {layers} "
            f"layers; use at most {layers}"
        )
    if layers % stages == 0:
        return None
    counts, extra = [layers // stages] * stages, layers % stages
    for stage in sorted(range(stages), key=lambda s: -min(s, stages - 1 - s))[:extra]:
        counts[stage] += 1
    layout = [["decoder"] * count for count in counts]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def check_layout(arch: Architecture, parallel: ParallelSettings) -> None:
    """Refuse a layout that this architecture cannot be trained under.

    Raises:
        ConfigError: experts that do not fit the layout, or fewer layers than stages.
        ConversionError: a tensor-parallel size that does not divide the widths.
    """
    check_tensor_parallel(arch, parallel.tensor)
    stage_layout(arch.layers, parallel.pipeline, parallel.virtual_pipeline)
    for key, size in (("tensor", parallel.tensor), ("context", parallel.context)):
        if arch.latent and size > 1:
            raise ConfigError(
                f"parallel.{key} = {size}: {arch.family} has latent attention, which is not cut; use 1, with "
                "parallel.expert and parallel.pipeline instead"
            )
    if arch.experts is None:
        if parallel.expert > 1:
            raise ConfigError(f"parallel.expert = {parallel.expert}: {arch.family} has no experts; use 1")
        return
    if arch.experts.count % parallel.expert:
        raise ConfigError(
            f"parallel.expert = {parallel.expert} does not divide the model's {arch.experts.count} experts"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise ConfigError(
            f"parallel.tensor = {parallel.tensor} with experts needs parallel.sequence = true: without it "
            "Megatron stops in the first forward pass"
        )
