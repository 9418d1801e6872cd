"""The process groups of one rank, handed around as one value."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup


def group_size(group: ProcessGroup | None) -> int:
    """Ranks in `group`; None stands for this rank alone, never for the default group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This rank's index in `group`; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


@dataclass(frozen=True)
class ParallelGroups:
    """Who shares what with this rank. None is a group of one: no communication is needed."""

    tp: ProcessGroup | None = None
    """Tensor parallel: one shard of every matrix, and of the vocabulary, each."""
    pp: ProcessGroup | None = None
    """Pipeline parallel: consecutive layers each."""
    cp: ProcessGroup | None = None
    """Context parallel: two zigzag chunks of every sequence each."""
    dp: ProcessGroup | None = None
    """Data parallel: different sequences each."""
    dp_cp: ProcessGroup | None = None
    """Data x context parallel: losses and token counts add up here."""
    ep: ProcessGroup | None = None
    """Expert parallel: different experts each."""
    world: ProcessGroup | None = None
    """Every learner rank, on the backend that carries tensors."""
    control: ProcessGroup | None = None
    """Every learner rank over gloo, for waits around sampling and saving."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return group_size(self.tp)

    @property
    def tp_rank(self) -> int:
        """Index among them, the order of the shards."""
        return group_rank(self.tp)

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return group_size(self.pp)

    @property
    def pp_rank(self) -> int:
        """This rank's stage."""
        return group_rank(self.pp)

    @property
    def cp_size(self) -> int:
        """C."""
        return group_size(self.cp)

    @property
    def cp_rank(self) -> int:
        """r, which zigzag chunks this rank holds."""
        return group_rank(self.cp)

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return group_size(self.dp)

    @property
    def dp_rank(self) -> int:
        """Index among them."""
        return group_rank(self.dp)

    @property
    def ep_size(self) -> int:
        """Expert-parallel ranks."""
        return group_size(self.ep)

    @property
    def world_size(self) -> int:
        """Learner ranks."""
        return group_size(self.world)

    @property
    def world_rank(self) -> int:
        """Index among them; rank 0 samples and writes."""
        return group_rank(self.world)
