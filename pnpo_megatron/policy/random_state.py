"""Every random generator of a rank, as tensors that a checkpoint can hold."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from megatron.core import tensor_parallel
from safetensors.torch import load_file, save_file
from torch import Tensor

_MEGATRON = "megatron."


def random_file(rank: int) -> str:
    """Where a rank's state lies in a checkpoint."""
    return f"random/rank_{rank:05d}.safetensors"


def random_state() -> dict[str, Tensor]:
    """State of Python's, numpy's, torch's and Megatron's generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    assert (version, name) == (3, "MT19937"), "the only generators there are in these versions"
    state = {
        "python": torch.tensor(words),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*(int(key) for key in keys), int(position), int(has_gauss)]),
        "numpy_gauss": torch.tensor(float(cached), dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return state | {_MEGATRON + key: value.cpu().clone() for key, value in tracked.items()}


def write_random_state(folder: Path, rank: int, state: dict[str, Tensor]) -> None:
    """Store one rank's state in an unpublished checkpoint."""
    path = folder / random_file(rank)
    path.parent.mkdir(exist_ok=True)
    save_file(state, path)


def restore_random_state(folder: Path, rank: int, world_size: int) -> bool:
    """Go on drawing where a checkpoint left off; False if it was written by another number of ranks."""
    if len(list((folder / random_file(0)).parent.glob("rank_*.safetensors"))) != world_size:
        return False
    state = load_file(folder / random_file(rank))
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if gauss != gauss else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"]))
    )
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    tracked = {
        key.removeprefix(_MEGATRON): value for key, value in state.items() if key.startswith(_MEGATRON)
    }
    tensor_parallel.get_cuda_rng_tracker().set_states(tracked)
    return True
