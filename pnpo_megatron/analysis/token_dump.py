"""Token dumps: what the objective decided about every token of one update (``train --dump-tokens STEP``).

``RUN/tokens/step_NNNNNN_epoch_E_update_U.safetensors`` holds flat arrays over the trained tokens of the
mini-batch: `policy_logprobs, old_logprobs, log_weight` float32; `advantages` float32; `keep` uint8;
`position, length, row` int32 (t, L, and the response's place in the mini-batch).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pnpo_megatron.algorithm import RatioStats
from pnpo_megatron.algorithm.fixed_point import to_grid
from pnpo_megatron.durable import write_whole
from pnpo_megatron.errors import DataError
from pnpo_megatron.types import MiniBatch

ARRAYS = ("policy_logprobs", "old_logprobs", "log_weight", "keep", "position", "length", "advantages", "row")
_NAME = re.compile(r"step_(\d+)_epoch_(\d+)_update_(\d+)\.safetensors")


@dataclass(frozen=True)
class TokenDump:
    """One update's tokens, response after response; all arrays [N]."""

    step: int
    epoch: int
    update: int
    arrays: Mapping[str, Tensor]

    @property
    def log_ratio(self) -> Tensor:
        """The log-ratio log rho_t, float64."""
        return self.arrays["policy_logprobs"].double() - self.arrays["old_logprobs"].double()

    @property
    def log_weight(self) -> Tensor:
        """The log-weight log w_t as the run's objective computed it, float64."""
        return self.arrays["log_weight"].double()

    @cached_property
    def stats(self) -> RatioStats:
        """Log-ratio statistics recomputed from the log-probs, for weights that the run did not use.

        Raises:
            DataError: a log-ratio is not finite.
        """
        token = self.log_ratio
        bad = int((~token.isfinite()).sum())
        if bad:
            raise DataError(f"update {self.update}: {bad} log-ratios are not finite; dump another step")
        position, length = self.arrays["position"].long(), self.arrays["length"].long()
        here = torch.arange(len(token))
        first, last = here - position + 1, here - position + length
        on_grid = to_grid(token)  # exact sums: what is subtracted is exactly what was added
        sums = on_grid.cumsum(0)
        before = sums[first] - on_grid[first]
        return RatioStats(
            token=token,
            prefix_sum=sums - before,
            response_sum=sums[last] - before,
            position=position,
            length=length,
            compute_preceding_min=lambda: _preceding_min(token, position),
            suffix_sums=lambda values: _suffix_sums(values, first, last),
        )


def _suffix_sums(values: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    sums = to_grid(values).cumsum(0)
    before = torch.cat([sums.new_zeros(1), sums])
    return sums[last] - before[:-1], sums[last] - before[first]


def token_arrays(mini_batch: MiniBatch, dumped: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Flat arrays of one update.

    Args:
        mini_batch: the update's sequences, with old log-probs.
        dumped: `policy_logprobs, log_weight, keep`, each one token-aligned [n] tensor a sequence.
    """
    columns: dict[str, list[Tensor]] = {name: [] for name in ARRAYS}
    for row, sequence in enumerate(mini_batch.sequences):
        mask, length = sequence.response_mask, sequence.length
        if sequence.old_logprobs is None:
            raise ValueError("the mini-batch has no old log-probs yet")
        for name in ("policy_logprobs", "log_weight"):
            columns[name].append(dumped[name][row][mask].float())
        columns["keep"].append(dumped["keep"][row][mask].to(torch.uint8))
        columns["old_logprobs"].append(sequence.old_logprobs[mask].float())
        columns["advantages"].append(torch.full((length,), sequence.advantage))
        columns["position"].append(torch.arange(1, length + 1, dtype=torch.int32))
        columns["length"].append(torch.full((length,), length, dtype=torch.int32))
        columns["row"].append(torch.full((length,), row, dtype=torch.int32))
    return {name: torch.cat(parts) for name, parts in columns.items()}


def write_tokens(run: Path, *, step: int, epoch: int, update: int, arrays: Mapping[str, Tensor]) -> Path:
    """Store one update's arrays under the run folder; the file appears whole or not at all."""
    folder = run / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}_epoch_{epoch}_update_{update}.safetensors"
    write_whole(path, lambda staged: save_file(dict(arrays), staged))
    return path


def read_tokens(run: Path) -> list[TokenDump]:
    """All dumps of a run, by update; none if there are none.

    Raises:
        DataError: a file that lacks an array, has arrays of different lengths, or a broken response.
    """
    named = ((_NAME.fullmatch(path.name), path) for path in (run / "tokens").glob("*.safetensors"))
    dumps = [_read(path, *(int(part) for part in name.groups())) for name, path in named if name]
    return sorted(dumps, key=lambda dump: dump.update)


def _read(path: Path, step: int, epoch: int, update: int) -> TokenDump:
    arrays = load_file(path)
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise DataError(f"{path}: no array {missing[0]}; write it again with train --dump-tokens {step}")
    if len({len(arrays[name]) for name in ARRAYS}) != 1:
        raise DataError(
            f"{path}: arrays of different lengths; write it again with train --dump-tokens {step}"
        )
    if not _complete(arrays):
        raise DataError(
            f"{path}: position and length do not describe whole responses one after another; write it again "
            f"with train --dump-tokens {step}"
        )
    return TokenDump(step, epoch, update, arrays)


def _complete(arrays: Mapping[str, Tensor]) -> bool:
    """Position runs 1..L in every response, and L is the response's own."""
    position, length = arrays["position"].long(), arrays["length"].long()
    if len(position) == 0:
        return True
    begins = torch.cat([torch.ones(1, dtype=torch.bool), (position == length)[:-1]])
    follows = torch.where(begins[1:], 1, position[:-1] + 1)
    same = begins[1:] | (length[1:] == length[:-1])
    return bool(
        position[0] == 1 and (position[1:] == follows).all() and same.all() and position[-1] == length[-1]
    )


def _preceding_min(token: Tensor, position: Tensor) -> Tensor:
    """Minimum of log rho_k over k < t, response by response; 0 at t = 1."""
    starts = torch.nonzero(position == 1).flatten().tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], len(token)], strict=True)]
    zero = token.new_zeros(1)
    parts = [torch.cat([zero, one[:-1].cummin(0).values]) for one in torch.split(token, lengths)]
    return torch.cat(parts)
