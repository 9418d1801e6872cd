"""What a model is, whichever family it comes from: plain values, read from a config.json by `hf_config`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies; ``kind`` is "default", "linear" or "llama3", and says which fields count."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2] float32 angles per position, as transformers computes them."""
        frequencies = 1.0 / (
            self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        )
        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Long wavelengths are divided by ``factor``, short ones kept, those between blended."""
        wavelengths = 2 * math.pi / frequencies
        low, high = self.low_freq_factor, self.high_freq_factor
        slowed = torch.where(
            wavelengths > self.original_positions / low, frequencies / self.factor, frequencies
        )
        smooth = (self.original_positions / wavelengths - low) / (high - low)
        blended = (1 - smooth) * slowed / self.factor + smooth * slowed
        between = (wavelengths <= self.original_positions / low) & (
            wavelengths >= self.original_positions / high
        )
        return torch.where(between, blended, slowed)


@dataclass(frozen=True)
class Experts:
    """The experts of one layer, and how their outputs are weighted."""

    count: int
    per_token: int
    ffn: int
    renormalise: bool
    """The weights of the chosen experts are rescaled to sum to 1."""


@dataclass(frozen=True)
class Yarn:
    """Slowed rotary frequencies, and a wider softmax."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class Latent:
    """Keys and values from one latent a token, dense layers first, shared experts, a grouped router."""

    query_rank: int | None
    """Width of the queries' latent; None where they have none."""
    rank: int
    plain_dim: int
    rope_dim: int
    """A head is ``plain_dim`` without positions, then ``rope_dim`` with them."""
    value_dim: int
    dense_layers: int
    shared_ffn: int
    groups: int
    chosen_groups: int
    scale: float
    """Of the chosen experts' weights, which sum to 1 before."""
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer, family by family the same few switches."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None
    """Set where every layer's MLP is a mixture; ``ffn`` is unused then, but for the first of a `Latent`."""
    latent: Latent | None = None
