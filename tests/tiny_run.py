"""Supervised updates of a tiny model with Megatron's own schedules: enough to move every weight and every
moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from packs import pack
from torch import Tensor


class TinyRun:
    """Model, optimizer and one update on random sequences that depend only on the update's number."""

    def __init__(
        self,
        folder: Path,
        sizes: dict[str, Any],
        *,
        dtype: torch.dtype = torch.float32,
        load: bool = True,
        **optimizer: Any,
    ) -> None:
        from pnpo_megatron.convert.hf_folder import HfFolder
        from pnpo_megatron.convert.stream import load_hf_weights
        from pnpo_megatron.policy.model import build_model
        from pnpo_megatron.policy.optimizer import OptimizerSettings, make_optimizer, wrap_data_parallel
        from pnpo_megatron.policy.process_groups import (
            ParallelSettings,
            initialize_parallel,
            release_parallel,
        )

        release_parallel()
        parallel = ParallelSettings(**sizes)
        self.groups = initialize_parallel(parallel, seed=1)
        self.source = HfFolder(folder)
        self.arch = self.source.architecture
        self.chunks: list[Any] = list(build_model(self.arch, parallel, dtype=dtype))
        if load:
            load_hf_weights(self.chunks, self.source, self.groups)
        self.settings = OptimizerSettings(**{"lr": 1e-2, "warmup_steps": 0, "eps": 1e-2, **optimizer})
        self.chunks = list(wrap_data_parallel(self.chunks, self.settings))
        self.optimizer = make_optimizer(self.chunks, self.settings)

    def micro_batches(self, update: int) -> list[Any]:
        """Four sequences in all, split over the data-parallel ranks, two a micro-batch."""
        generator = torch.Generator().manual_seed(100 + update)
        lengths = (6, 12, 8, 10)
        sequences = [torch.randint(0, self.arch.vocab, (n,), generator=generator) for n in lengths]
        count = 4 // self.groups.dp_size
        mine = sequences[self.groups.dp_rank * count : (self.groups.dp_rank + 1) * count]
        return [pack([one], multiple=4) for one in mine]

    def forward_backward(self, update: int) -> Tensor:
        """Summed gradients in the buffers; the summed loss of this rank's tokens (0 before the last
        stage)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from pnpo_megatron.policy.model import hidden_states

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        packs = self.micro_batches(update)

        def step(batches: Iterator[Any], chunk: Any, *_: Any) -> Any:
            packed = next(batches)
            return hidden_states(chunk, packed), lambda hidden: self._loss(hidden, packed)

        losses = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(packs) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(packs),
            seq_length=max(len(one.tokens) for one in packs),
            micro_batch_size=1,
            forward_only=False,
        )
        return torch.stack([*losses, torch.zeros(())]).sum()

    def _loss(self, hidden: Tensor, packed: Any) -> Any:
        logprobs = self.logprobs(hidden, packed)
        loss = -(logprobs * packed.response_mask).sum()
        return loss, packed.response_mask.sum().to(torch.int), loss.detach()

    def logprobs(self, hidden: Tensor, packed: Any) -> Tensor:
        """[T] of the labels, from what the last stage returned."""
        from pnpo_megatron.parallel.gather import gather_first_dim
        from pnpo_megatron.parallel.vocab_logprobs import chunked_logprobs
        from pnpo_megatron.policy.model import output_weight

        states, sequence = hidden[0], self.chunks[-1].config.sequence_parallel
        return chunked_logprobs(
            gather_first_dim(states, self.groups.tp) if sequence else states,
            output_weight(self.chunks[-1]),
            packed.labels,
            temperature=1.0,
            vocab_size=self.arch.vocab,
            tp_group=self.groups.tp,
            partial_hidden_grad=sequence,
        )[0]

    def update(self, number: int) -> Tensor:
        """One optimizer step; the loss of this rank's tokens."""
        from pnpo_megatron.policy.optimizer import apply_gradient, gradient_norm, set_learning_rate

        loss = self.forward_backward(number)
        set_learning_rate(self.optimizer, self.settings, 1)
        norm = gradient_norm(self.optimizer)
        apply_gradient(self.optimizer, 1.0, norm)
        return loss

    def export(self) -> dict[str, Tensor]:
        """Every HF tensor."""
        from pnpo_megatron.convert.stream import export_hf

        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return {name: tensor.clone() for name, tensor in export_hf(self.chunks, self.arch, self.groups)}
