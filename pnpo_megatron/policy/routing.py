"""The routers of a mixture of experts: their load, and the routes of old log-probs, replayed over K epochs.

An update moves weights, and with them the choice of experts of tokens near a tie: their log-ratios jump, and
the prefix mean carries the jump to every later token. With replay, each token goes to the experts that it
went to when its old log-probs were computed, or already where it was sampled (`TrainSequence.routes`);
gradients still reach the router through the chosen scores.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import Tensor

from pnpo_megatron.convert.architecture import Experts
from pnpo_megatron.data.packing import FlatTokens
from pnpo_megatron.errors import TrainingFaultError
from pnpo_megatron.parallel.groups import ParallelGroups
from pnpo_megatron.parallel.reduce import sum_over
from pnpo_megatron.types import MiniBatch, PackedBatch


@dataclass
class Routing:
    """Routers of this rank's model chunks. Methods are collective but for `before` and `after`."""

    chunks: Sequence[torch.nn.Module]
    groups: ParallelGroups
    layers: int
    """Of the whole model."""
    experts: Experts | None
    """None for a dense model, where there is nothing to do."""
    split: bool
    """Tensor-parallel ranks route different tokens (sequence parallelism)."""
    replay: bool
    routers: list[list[Any]] = field(init=False)
    load: Tensor = field(init=False)
    """[layers, experts] tokens that this rank has sent since the last `use`."""
    _known: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)
    """Identity of a sequence's ids -> (the ids, weakly; [n, this rank's layers, k] int16 on the host)."""
    _recorded: dict[int, list[tuple[PackedBatch, Tensor]]] = field(default_factory=dict)
    """Layer -> what its router chose for each micro-batch."""
    _targets: Tensor | None = None
    """[N, this rank's layers, k] on the host: on the device, a whole mini-batch's would be gigabytes."""

    def __post_init__(self) -> None:
        RouterReplay.clear_global_router_replay_instances()  # Megatron's list would keep every model alive
        self.routers = [
            [one for one in chunk.modules() if isinstance(one, TopKRouter)] for chunk in self.chunks
        ]
        self._all_routers = [one for chunk in self.routers for one in chunk]
        self._layers = [one.layer_number - 1 for one in self._all_routers]
        device = next(self.chunks[0].parameters()).device
        self.load = torch.zeros(self.layers, self.experts.count if self.experts else 0, device=device)
        for router in self._all_routers:
            router.register_forward_hook(self._count)

    def record(self, mini_batch: MiniBatch) -> None:
        """Forward passes that follow take the sampler's routes, or choose freely, for `keep` to remember."""
        self._recorded.clear()
        if _sampled_routes(mini_batch):
            self.use(mini_batch)
        else:
            self._act(RouterReplayAction.RECORD)

    def keep(self, mini_batch: MiniBatch, flat: FlatTokens) -> None:
        """Join what the ranks recorded: for each layer an all-reduce of tokens x k int32 over each group."""
        self.release()
        if not self.replay or self.experts is None or _sampled_routes(mini_batch) or not self._layers:
            return
        columns = []
        for layer in self._layers:
            shape = (len(flat.ids), self.experts.per_token)
            column = torch.zeros(shape, dtype=torch.int32, device=self.load.device)
            for packed, chosen in self._recorded.pop(layer, []):
                place, real = self._places(packed, flat)
                column[place[real]] = chosen[real].to(column.dtype)
            columns.append(self._over_stage(column).to(torch.int16).cpu())
        parts = torch.stack(columns, dim=1).split(flat.starts.diff().tolist())
        self._known = {key: one for key, one in self._known.items() if one[0]() is not None}
        for sequence, part in zip(mini_batch.sequences, parts, strict=True):
            self._known[id(sequence.ids)] = (weakref.ref(sequence.ids), part.clone())

    def use(self, mini_batch: MiniBatch) -> None:
        """Start to count the load; the forward passes that follow take the sampler's routes, or `keep`'s.

        Raises:
            TrainingFaultError: a sequence was never scored by this process.
        """
        self.load.zero_()
        if not self.replay or not self._layers:
            return
        known = (self._known.get(id(sequence.ids)) for sequence in mini_batch.sequences)
        sampled = [one[:, self._layers] for one in _sampled_routes(mini_batch)]
        found = sampled or [one[1] for one in known if one is not None]
        if len(found) < len(mini_batch.sequences):
            raise TrainingFaultError(
                "model.router_replay: this batch's routes are not known; its old log-probs have to be "
                "computed in the same process"
            )
        self._targets = torch.cat(found)
        self._act(RouterReplayAction.REPLAY_FORWARD)

    def release(self) -> None:
        """Free choice again."""
        self._targets = None
        self._act(None)

    def before(self, chunk: int, packed: PackedBatch, flat: FlatTokens) -> None:
        """Hand the routes of one micro-batch to the routers of one chunk."""
        if self._targets is None:
            return
        place, real = self._places(packed, flat)
        columns = self._targets[place.cpu()].to(place.device)
        k = columns.shape[2]
        spread = torch.arange(len(place), device=place.device)[:, None] + torch.arange(k, device=place.device)
        for router in self.routers[chunk]:
            routes = columns[:, self._layers.index(router.layer_number - 1)].long()
            # Padding has no route: it is dealt out evenly.
            target = torch.where(real[:, None], routes, spread % self.load.shape[1])
            router.router_replay.clear_indices()
            router.router_replay.set_target_indices(target)

    def after(self, chunk: int, packed: PackedBatch) -> None:
        """Take what the routers of one chunk recorded for one micro-batch."""
        for router in self.routers[chunk]:
            if self.replay and router.router_replay.router_replay_action == RouterReplayAction.RECORD:
                chosen = router.router_replay.get_recorded_indices()
                self._recorded.setdefault(router.layer_number - 1, []).append((packed, chosen))

    def metrics(self) -> dict[str, float]:
        """Of the last update: `moe/max_load`, the busiest expert's tokens over the mean (1 is balanced),
        averaged over layers, and `moe/idle_experts`, the share of experts that got no token."""
        if self.experts is None:
            return {}
        load = self._over_ranks(self.load)
        load = load[load.any(1)] if load.any() else load  # layers without experts aside
        mean = load.mean(1).clamp(min=1.0)
        return {
            "moe/max_load": float((load.amax(1) / mean).mean()),
            "moe/idle_experts": float((load == 0).float().mean()),
        }

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move every expert's bias by `rate`, up where it got less than the mean, down where it got more
        (DeepSeek-V3, arXiv 2412.19437, 2.1.2). Megatron would do so before an update that is then skipped."""
        if not rate:
            return
        load = self._over_ranks(self.load)
        for router in self._all_routers:
            seen = load[router.layer_number - 1]
            router.expert_bias += rate * (seen.mean() - seen).sign()

    def _over_ranks(self, part: Tensor) -> Tensor:
        """The sum over all ranks that route other tokens, or have other layers."""
        return sum_over(self._over_stage(part), self.groups.pp)

    def _over_stage(self, part: Tensor) -> Tensor:
        """The sum over the ranks that route other tokens through the same layers."""
        for group in (self.groups.dp_cp, self.groups.tp if self.split else None):
            part = sum_over(part, group)
        return part

    def _count(self, router: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
        self.load[router.layer_number - 1] += output[1].sum(0)

    def _act(self, action: RouterReplayAction | None) -> None:
        for router in self._all_routers if self.replay else ():
            router.router_replay.set_router_replay_action(action)

    def _places(self, packed: PackedBatch, flat: FlatTokens) -> tuple[Tensor, Tensor]:
        """([n] place in the flat mini-batch, [n] whether it is a token at all) of what this rank routes."""
        rows = torch.tensor(packed.rows)
        start = flat.starts[rows.clamp(min=0)]
        length = torch.where(rows >= 0, flat.starts[rows.clamp(min=0) + 1] - start, 0)
        width = 2 * packed.chunk_lengths
        start, length = (torch.repeat_interleave(x.to(width.device), width) for x in (start, length))
        real = packed.position_ids < length
        place = torch.where(real, start + packed.position_ids, 0)
        if self.split:
            place, real = (x.chunk(self.groups.tp_size)[self.groups.tp_rank] for x in (place, real))
        return place, real


def _sampled_routes(mini_batch: MiniBatch) -> list[Tensor]:
    """Of every sequence, if the sampler told them."""
    return [one.routes for one in mini_batch.sequences if one.routes is not None]
