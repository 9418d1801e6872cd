"""Token dumps: what the objective decided about every token of one update (``train --dump-tokens STEP``).

``RUN/tokens/step_NNNNNN_epoch_E_update_U.safetensors`` holds flat arrays over the trained tokens of the
mini-batch: `policy_logprobs, old_logprobs, log_weight` float32; `advantages` float32; `keep` uint8;
`position, length, row` int32 (t, L, and the response's place in the mini-batch).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pnpo_megatron.algorithm import padded_ratio_stats
from pnpo_megatron.algorithm.weights import Weight
from pnpo_megatron.durable import write_whole
from pnpo_megatron.errors import DataError
from pnpo_megatron.types import MiniBatch, token_aligned

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

    def recomputed(self, weight: Weight) -> Tensor:
        """[N] float64: a weight that the run need not have used, from the log-probs.

        Raises:
            DataError: a log-ratio is not finite.
        """
        bad = int((~self.log_ratio.isfinite()).sum())
        if bad:
            raise DataError(f"update {self.update}: {bad} log-ratios are not finite; dump another step")
        lengths = self.arrays["row"].bincount(minlength=1)
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        policy, old = (
            token_aligned(self.arrays[f"{name}_logprobs"].double(), mask) for name in ("policy", "old")
        )
        stats = padded_ratio_stats(policy, old, mask)
        return weight(stats).expand_as(stats.token)[mask]


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
        DataError: a file that lacks an array.
    """
    named = ((_NAME.fullmatch(path.name), path) for path in (run / "tokens").glob("*.safetensors"))
    dumps = [_read(path, *(int(part) for part in name.groups())) for name, path in named if name]
    return sorted(dumps, key=lambda dump: dump.update)


def _read(path: Path, step: int, epoch: int, update: int) -> TokenDump:
    arrays = load_file(path)
    missing = [name for name in ARRAYS if name not in arrays]
    if missing:
        raise DataError(f"{path}: no array {missing[0]}; write it again with train --dump-tokens {step}")
    return TokenDump(step, epoch, update, arrays)
