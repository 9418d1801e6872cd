"""Every random generator of a rank, in a checkpoint."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel


def random_file(rank: int) -> str:
    """Where a rank's state lies in a checkpoint."""
    return f"random/rank_{rank:05d}.pt"


def random_state() -> dict[str, Any]:
    """State of Python's, numpy's, torch's and Megatron's generators: tensors and plain values."""
    numpy: Any = np.random.get_state()  # its name, [624] keys, and three numbers
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    return {
        "python": random.getstate(),
        "numpy": (numpy[0], numpy[1].tolist(), *numpy[2:]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {key: value.cpu().clone() for key, value in tracked.items()},
    }


def write_random_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Store one rank's state in an unpublished checkpoint."""
    path = folder / random_file(rank)
    path.parent.mkdir(exist_ok=True)
    torch.save(state, path)


def restore_random_state(folder: Path, rank: int, world_size: int) -> bool:
    """Go on drawing where a checkpoint left off; False if it was written by another number of ranks."""
    if len(list((folder / random_file(0)).parent.glob("rank_*.pt"))) != world_size:
        return False
    state = torch.load(folder / random_file(rank), weights_only=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
    return True
