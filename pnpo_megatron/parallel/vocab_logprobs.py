"""Log-probs and entropy from hidden states, output layer included, without ever holding [T, V] logits.

Both passes walk over blocks of tokens x vocabulary rows. The forward pass keeps a running maximum and sums,
as flash attention does; the backward pass recomputes each block's logits and adds its share to both
gradients. With the vocabulary sharded over tensor-parallel ranks, only [N] vectors cross: one maximum and one
sum forward, and the [N, h] gradient of the hidden states backward. The collectives sit inside the autograd
function, so every shard's gradient is complete.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from pnpo_megatron.parallel.groups import group_rank, group_size

_BLOCK_ELEMENTS = 8 * 2**20
"""Logits in one block, at most: 32 MiB of float32."""
_CAST_ROWS = 4096
"""Rows of a bfloat16 weight that are cast to float32 at a time, where the device cannot multiply into it."""
_KEPT_ELEMENTS = 64 * 2**20
"""Logits kept for the backward pass, at most 256 MiB: what fits is not computed twice."""

_Blocks = dict[tuple[int, int], Tensor]
"""Logits of kept blocks, by their first token and row."""


@dataclass(frozen=True)
class Head:
    """How hidden states become log-probs."""

    temperature: float
    vocab_size: int
    """Real entries; rows of padding beyond it are never read."""
    tp_group: ProcessGroup | None
    chunk_tokens: int
    partial_hidden_grad: bool
    training: bool
    """A backward pass will follow."""

    def valid_rows(self, weight: Tensor) -> tuple[int, int]:
        """(first vocabulary entry on this rank, how many of its rows are real)."""
        first = group_rank(self.tp_group) * weight.shape[0]
        return first, min(max(self.vocab_size - first, 0), weight.shape[0])

    def blocks(self, tokens: int, weight: Tensor) -> Iterator[tuple[slice, slice]]:
        """Token and row slices of every block, rows innermost; the same in both passes and modes."""
        rows = self.valid_rows(weight)[1]
        height = max(1, min(self.chunk_tokens, tokens))
        width = max(1, _BLOCK_ELEMENTS // height)
        if not weight.is_cuda and weight.dtype != torch.float32:
            width = min(width, _CAST_ROWS)
        for token in range(0, tokens, height):
            for row in range(0, rows, width):
                yield slice(token, min(token + height, tokens)), slice(row, min(row + width, rows))


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_group: ProcessGroup | None,
    chunk_tokens: int = 1024,
    partial_hidden_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weight.T / temperature) at the labels, and the entropy of that distribution.

    The product is float32 (bfloat16 logits are already rounded by 0.125 at magnitude 16). Where Megatron's
    DDP gave the weight a `main_grad`, its gradient is accumulated there in place.

    Args:
        hidden: [N, h], the positions to score only, the same on every rank of tp_group.
        weight: [V/tp, h] output layer shard, padded rows included.
        labels: [N] int64, below vocab_size; a negative label gives log-prob 0 and no gradient, one beyond the
            vocabulary gives NaN.
        temperature: > 0, what the sampler used.
        vocab_size: real vocabulary; padded rows are masked out, whatever they hold.
        tp_group: ranks that share the vocabulary in rank order, or None.
        chunk_tokens: tokens scored together; it bounds memory and has no other effect than rounding.
        partial_hidden_grad: leave the gradient of `hidden` unsummed over tp_group; for hidden states from
            `gather_first_dim`, whose own backward sums them.
    Returns:
        (logprobs [N], entropy [N]), float32, nats. Communication: all-reduces of N and 3N floats forward and,
        if not partial, of N*h backward.
    """
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature}: log-probs are defined for temperatures above 0")
    if vocab_size > weight.shape[0] * group_size(tp_group):
        raise ValueError(
            f"vocab_size = {vocab_size}, but the output layer has {weight.shape[0]} rows on each of "
            f"{group_size(tp_group)} ranks"
        )
    head = Head(temperature, vocab_size, tp_group, chunk_tokens, partial_hidden_grad, torch.is_grad_enabled())
    return _ChunkedLogprobs.apply(hidden, weight, labels, head)  # type: ignore[no-any-return, no-untyped-call]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, head: Head
    ) -> tuple[Tensor, Tensor]:
        ctx.kept = {}
        target, log_total, entropy = _statistics(hidden, weight, labels, head, ctx.kept)
        ctx.save_for_backward(hidden, weight, labels, log_total, entropy)
        ctx.head = head
        ctx.parameter = weight  # main_grad and its flags are attributes of this very object
        ctx.set_materialize_grads(False)  # the entropy is usually only logged
        return torch.where(labels >= 0, target - log_total, 0.0), entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, labels, log_total, entropy = ctx.saved_tensors
        head: Head = ctx.head
        first, _ = head.valid_rows(weight)
        main_grad = getattr(ctx.parameter, "main_grad", None) if ctx.needs_input_grad[1] else None
        weight_grad: Tensor | None = main_grad
        if main_grad is None and ctx.needs_input_grad[1]:
            weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        hidden_grad = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(entropy)
        grad_target = torch.where(labels >= 0, grad_logprobs, 0.0) / head.temperature
        if grad_entropy is not None:
            grad_entropy = grad_entropy / head.temperature

        for token, row in head.blocks(hidden.shape[0], weight):
            factor = _product_operand(weight[row])
            logits = ctx.kept.pop((token.start, row.start), None)
            grad = _block_gradient(
                _logits(hidden[token], factor, head.temperature) if logits is None else logits,
                labels[token] - first - row.start,
                grad_target[token],
                None if grad_entropy is None else grad_entropy[token],
                log_total[token],
                entropy[token],
            )
            grad = grad.to(factor.dtype)
            _add_product(hidden_grad[token], grad, factor)
            if weight_grad is not None:
                _add_product(weight_grad[row], grad.t(), _product_operand(hidden[token]))

        if head.tp_group is not None and not head.partial_hidden_grad and hidden_grad.numel():
            dist.all_reduce(hidden_grad, group=head.tp_group)
        returned: Tensor | None = None
        if main_grad is not None:
            returned = _already_accumulated(ctx.parameter)
        elif weight_grad is not None:
            returned = weight_grad.to(weight.dtype)
        return hidden_grad.to(hidden.dtype), returned, None, None


def _statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, head: Head, kept: _Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """(target logit, log of the sum of exponentials, entropy), each [N] float32, complete over tp_group.

    The first blocks' logits are left in `kept`, as many as are worth their memory.
    """
    budget = _KEPT_ELEMENTS if head.training else 0
    count = hidden.shape[0]
    first, _ = head.valid_rows(weight)
    maximum = torch.full((count,), -torch.inf, dtype=torch.float32, device=hidden.device)
    # Sum of exp(z - maximum), of exp(z - maximum) * z, and the target's z where this rank owns it.
    sums = torch.zeros(3, count, dtype=torch.float32, device=hidden.device)
    for token, row in head.blocks(count, weight):
        logits = _logits(hidden[token], _product_operand(weight[row]), head.temperature)
        index = labels[token] - first - row.start
        owned = (index >= 0) & (index < logits.shape[1])
        found = logits.gather(1, index.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        sums[2, token] += torch.where(owned, found, 0.0)
        highest = torch.maximum(maximum[token], logits.amax(1))
        sums[:2, token] *= (maximum[token] - highest).exp()
        maximum[token] = highest
        exponentials = (logits - highest[:, None]).exp_()
        sums[0, token] += exponentials.sum(1)
        sums[1, token] += torch.linalg.vecdot(exponentials, logits)
        if logits.numel() <= budget:
            kept[token.start, row.start] = logits
            budget -= logits.numel()
    if head.tp_group is not None and count:
        local = maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=head.tp_group)
        sums[:2] *= (local - maximum).exp()
        dist.all_reduce(sums, group=head.tp_group)
    total, weighted, target = sums
    log_total = maximum + total.log()
    target = torch.where(labels < head.vocab_size, target, torch.nan)
    return target, log_total, log_total - weighted / total


def _logits(hidden: Tensor, factor: Tensor, temperature: float) -> Tensor:
    """[n, h] x [v, h] -> [n, v] float32, divided by the temperature."""
    logits = _product(_product_operand(hidden), factor.t())
    return logits if temperature == 1 else logits.div_(temperature)


def _block_gradient(
    logits: Tensor,
    index: Tensor,
    grad_target: Tensor,
    grad_entropy: Tensor | None,
    log_total: Tensor,
    entropy: Tensor,
) -> Tensor:
    """d loss / d logits of one block, in the memory of `logits`: (onehot - p) g - p (log p + H) g_H."""
    log_p = logits.sub_(log_total[:, None])
    if grad_entropy is None:
        grad = log_p.exp_().mul_(-grad_target[:, None])
    else:
        p = log_p.exp()
        factor = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_target[:, None])
        grad = factor.mul_(p)
    owned = (index >= 0) & (index < grad.shape[1])
    column = index.clamp(0, grad.shape[1] - 1)[:, None]
    return grad.scatter_add_(1, column, torch.where(owned, grad_target, 0.0)[:, None])


def _product_operand(matrix: Tensor) -> Tensor:
    """CUDA multiplies bfloat16 into float32 itself; elsewhere the operands are cast, one block at a time."""
    return matrix if matrix.is_cuda else matrix.float()


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in float32."""
    if left.dtype == torch.float32:
        return torch.mm(left, right)
    return torch.mm(left, right, out_dtype=torch.float32)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in place; the product is float32 whatever the dtype of `total`."""
    if total.dtype == left.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += _product(left, right)


def _already_accumulated(weight: Tensor) -> Tensor:
    """What autograd hands to DDP's hook for a gradient that is in `main_grad` already: zero, and no memory.

    None would not do: the hook of `overlap_grad_reduce` asserts a gradient, and a tied embedding on the same
    pipeline stage adds its own to it (Megatron marks that weight `zero_out_wgrad`).
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    indices = torch.empty(2, 0, dtype=torch.int64, device=weight.device)
    values = torch.empty(0, dtype=weight.dtype, device=weight.device)
    return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False)
