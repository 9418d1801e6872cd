"""What Megatron-Core 0.16.1 needs to run on gloo without CUDA: explicit patches, in one place.

`install` runs before any Megatron import and is never loaded where a GPU is there. Megatron names the CUDA
device literally in many places; each patch below answers one of those calls with its CPU meaning.
`torch.cuda.is_available()` stays False, so code that asks first keeps taking its CPU branch.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pnpo_megatron.policy import plain_adam

_CPU = torch.device("cpu")
_installed = False


class _NoStream:
    """A CUDA stream or event where everything already runs in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> _NoStream:
        """An event that has already happened."""
        return _NoStream()

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _CpuGenerators:
    """The CPU generator under every device index."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


@contextlib.contextmanager
def _same_stream(stream: Any) -> Iterator[None]:
    yield


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same tensor factory with ``device="cuda"`` read as CPU and pinned memory dropped."""

    def on_cpu(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        elif kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


_tensor_type = Tensor.type


def _type_without_cuda(self: Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``tensor.type()`` says torch.cuda.FloatTensor and the like: Megatron sorts gradients by these names."""
    if dtype is None:
        return _tensor_type(self).replace("torch.", "torch.cuda.", 1)
    return _tensor_type(self, dtype, *args, **kwargs)


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


# (object, attribute, replacement, who calls it in megatron-core 0.16.1). Each was seen in use by counting
# calls over TP+SP, PP, VPP, DP, checkpoints, bfloat16 and EP.
_TORCH_PATCHES: tuple[tuple[Any, str, Any, str], ...] = (
    (
        torch.cuda,
        "current_device",
        lambda: _CPU,
        "every parameter and buffer: layers.py:552, mappings.py:141",
    ),
    (
        torch.cuda,
        "manual_seed",
        lambda seed: torch.default_generator.manual_seed(seed),
        "RNG tracker, random.py",
    ),
    (torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state(), "RNG tracker, random.py:235"),
    (torch.cuda.random, "get_rng_state", lambda device="cuda": torch.get_rng_state(), "random.py:55"),
    (torch.cuda, "default_generators", _CpuGenerators(), "RNG tracker, random.py:97"),
    (torch.cuda, "_lazy_call", lambda call, **_: call(), "RNG tracker, random.py:111; imported by name"),
    (torch.cuda, "stream", _same_stream, "MoE all-to-all, token_dispatcher.py:871"),
    (
        torch.cuda,
        "current_stream",
        lambda device=None: _NoStream(),
        "MoE all-to-all, token_dispatcher.py:871",
    ),
    (torch.cuda, "Stream", _NoStream, "MoE all-to-all, token_dispatcher.py:445"),
    (
        torch.cuda,
        "synchronize",
        lambda device=None: None,
        "batched p2p, p2p_communication.py:242; checkpoints",
    ),
    (torch, "zeros", _on_cpu(torch.zeros), "schedules.py:596, clip_grads.py:103"),
    (torch, "tensor", _on_cpu(torch.tensor), "optimizer.py:481, rope_utils.py:62"),
    (Tensor, "cuda", lambda self, *_, **__: self, "rope_utils.py:64, tied embeddings"),
    (Tensor, "type", _type_without_cuda, "clip_grads.py:167, distrib_optimizer.py:361"),
)


def _megatron_patches() -> None:
    """Faults of Megatron-Core 0.16.1 that show only without TransformerEngine."""
    # torch.compile is slower than what it saves here, needs a compiler, and takes seconds to be imported: by
    # the time that `disable_jit_fuser` can be called, Megatron's own imports have used it.
    compile_function = torch.compile
    vars(torch)["compile"] = lambda function: function
    jit = importlib.import_module("megatron.core.jit")
    vars(torch)["compile"] = compile_function
    jit.disable_jit_fuser()
    plain_adam.install()
    # moe_utils.py:1093 turns only CUDA tensors into the numpy split sizes that all_to_all needs.
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    vars(dispatcher)["maybe_move_tensor_to_cpu"] = _split_sizes


_NOISE = (
    ".*CUDA_DEVICE_MAX_CONNECTIONS",  # advice for GPUs
    r"The \.grad attribute of a Tensor that is not a leaf",  # Megatron looks at its fp32 views
    r"`torch\.distributed\..*` is deprecated",  # Megatron's names for collectives that torch 2.13 renamed
)


def _is_not_rng_noise(record: logging.LogRecord) -> bool:
    # The CPU generator plays the CUDA one, so it does change inside a "CUDA" RNG context.
    return "CPU RNG state changed" not in record.getMessage()


def install() -> None:
    """Apply the patches once. A no-op where CUDA is available.

    Raises:
        RuntimeError: Megatron was imported first, so it holds the unpatched names.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core.tensor_parallel" in sys.modules:
        raise RuntimeError(
            "megatron.core was imported before pnpo_megatron.policy, so its CPU patches come too late; "
            "import pnpo_megatron.policy first"
        )
    # Meta-device contexts know tensor factories by identity and list them once: they must list torch's own.
    # Otherwise from_pretrained of transformers leaves rotary frequencies uninitialised, without a word.
    importlib.import_module("torch.utils._device")._device_constructors()
    for owner, name, replacement, _ in _TORCH_PATCHES:
        setattr(owner, name, replacement)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_not_rng_noise)
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing says that TransformerEngine and apex are missing
        _megatron_patches()
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    _installed = True
