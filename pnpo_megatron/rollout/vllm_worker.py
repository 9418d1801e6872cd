"""What runs in the child process that holds the engine (`worker_main` starts it).

This file and `vllm_transfer` alone import vllm; this one does so only inside functions.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.engine_driver import EngineDriver, Outbox
from pnpo_megatron.rollout.messages import (
    Done,
    LoadWeights,
    Ready,
    Reply,
    StreamWeights,
    WeightBucket,
    WorkerError,
)
from pnpo_megatron.rollout.settings import EngineSettings
from pnpo_megatron.rollout.weight_stream import ipc_fields
from pnpo_megatron.rollout.weight_transfer import WeightReceiver, verified
from pnpo_megatron.types import Sampling

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

_COMPILER = "torch._inductor.lowering"


def sampling_fields(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams, all of them stated (TRAPS H34).

    ``ignore_eos`` switches off the end tokens that vLLM reads from generation_config.json by itself:
    what stops a response is exactly `sampling.stop_token_ids`.
    """
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": [],
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
    }


def sampling_params(sampling: Sampling, seed: int) -> SamplingParams:
    """The engine's own object for one response."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    finished = RequestOutputKind.FINAL_ONLY  # what is unfinished nobody reads
    return SamplingParams(**sampling_fields(sampling, seed), output_kind=finished)


def build_engine(settings: EngineSettings) -> LLMEngine:
    """An engine in this process, with the weights of the model folder."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        # vLLM imports torch's compiler to patch it, for seconds, and goes on where that cannot be imported.
        sys.modules[_COMPILER] = None  # type: ignore[assignment]
        importlib.import_module("vllm")
        del sys.modules[_COMPILER]
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    gc.freeze()  # vLLM collects garbage five times while it builds
    engine = LLMEngine.from_engine_args(EngineArgs(**settings.arguments()))
    gc.enable()
    return engine


def replace_weights(engine: LLMEngine, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Load a whole model of HF-named tensors and drop what was computed with the old one; their number."""
    names: list[str] = []

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            names.append(name)
            yield name, tensor

    engine.apply_model(lambda model: load_model(model, engine.vllm_config.model_config, noted()))
    drop_prefix_cache(engine)
    return len(names)


def load_model(model: nn.Module, model_config: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a whole model of HF-named tensors into one worker's part of it.

    Raises:
        RolloutError: the model has parameters that no tensor set.
    """
    unset = begin_reload(model)
    unset -= set(model.load_weights(tensors))  # type: ignore[operator]
    end_reload(model, model_config, unset)


def begin_reload(model: nn.Module) -> set[str]:
    """Make ready for a whole model's tensors; the names of the parameters that they will set."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters = {name for name, _ in model.named_parameters()}
    prepack_experts_again(model)
    initialize_layerwise_reload(model)
    for layer in model.modules():  # of a reload that was cut short vLLM keeps, and counts, what came
        info = get_layerwise_info(layer)
        info.loaded_weights, info.load_numel = [], 0
    return parameters


def end_reload(model: nn.Module, model_config: Any, unset: set[str]) -> None:
    """Put what came into use; RolloutError if parameters are `unset`."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
    missing = unset - repack_tied_lm_head(model)
    if missing:
        raise RolloutError(
            f"weight sync: the engine's parameters {sorted(missing)[:3]} were set by no tensor"
        )


def prepack_experts_again(model: nn.Module) -> None:
    """Forget the CPU kernels of experts: vLLM 0.32 packs their weights only when it makes a kernel.

    Reloaded weights would stay unpacked: refused where packing pads them, wrong in silence where it does not.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(getattr(method, "unquantized_backend", None), "name", "") == "CPU":
            method.moe_kernel = None  # type: ignore[union-attr]


def repack_tied_lm_head(model: nn.Module) -> set[str]:
    """Pack a tied head again from the new embedding, and name it: the CPU build leaves the old one in force.

    Nothing to do on GPUs, where the head is the embedding's own tensor.
    """
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for module in model.modules():
        if (
            tied
            and type(module).__name__ == "ParallelLMHead"
            and getattr(module, "cpu_linear", None) is not None
        ):
            module.quant_method.process_weights_after_loading(module)  # type: ignore[union-attr, operator]
    return {"lm_head.weight"} if tied else set()


def drop_prefix_cache(engine: LLMEngine) -> None:
    """Empty the prefix cache: its keys and values belong to the old weights (TRAPS H32)."""
    if not engine.reset_prefix_cache():
        raise RolloutError(
            "weight sync: the engine refused to empty its prefix cache; requests still hold blocks"
        )


def ipc_tensors(call: int, conn: Connection, send: Callable[[Reply], None]) -> Iterator[tuple[str, Tensor]]:
    """Copies of what the trainer lends on the engine's GPU, bucket by bucket."""
    from vllm.distributed.weight_transfer.packed_tensor import PackedBufferImporter, packed_ipc_consumer

    importer = PackedBufferImporter()
    while True:
        send(Done(call))
        bucket = conn.recv()
        if not isinstance(bucket, WeightBucket):
            raise EOFError  # the trainer gave the sync up, and with it the engine
        if not bucket.entries:
            return
        fields, device = ipc_fields(bucket.entries), torch.cuda.current_device()
        tensors = packed_ipc_consumer(bucket.content, **fields, device_index=device, importer=importer)
        for entry, (name, tensor) in zip(bucket.entries, tensors, strict=True):
            yield name, verified(entry, tensor)


def run(control: int, weights: int) -> int:
    """Build the engine and serve the control pipe until it ends; both arguments are file descriptors."""
    conn = Connection(control)
    outbox = Outbox(conn)
    try:
        started = time.monotonic()
        engine = build_engine(conn.recv())
        receiver = WeightReceiver(weights)

        def load(command: LoadWeights | StreamWeights) -> int:
            if isinstance(command, StreamWeights):
                return replace_weights(engine, ipc_tensors(command.call, conn, outbox.send))
            return replace_weights(engine, receiver.tensors(command.entries))

        import vllm

        driver = EngineDriver(engine, sampling_params, load, outbox.send)
        outbox.send(Ready(time.monotonic() - started, vllm.__version__))
        driver.serve(conn)
    except EOFError:
        return 1  # the trainer is gone
    except Exception as error:  # the boundary of the process: nothing of vllm crosses the pipe but text
        traceback.print_exc()
        outbox.send(WorkerError(None, type(error).__name__, str(error), fatal=True))
        return 1
    finally:
        outbox.close()
    return 0
