"""What runs in the child process that holds the engine (`worker_main` starts it).

The only file that imports vllm, and only inside functions. The loop looks at the pipe before every
engine step, so an abort or the end of the trainer is noticed within one step.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from pnpo_megatron.errors import RolloutError
from pnpo_megatron.rollout.messages import (
    Abort,
    CallDone,
    Command,
    EngineSettings,
    Generate,
    GroupDone,
    LoadWeights,
    PromptFailed,
    PromptRequest,
    Ready,
    Reply,
    SamplingValues,
    Shutdown,
    WeightsLoaded,
    WorkerError,
)
from pnpo_megatron.rollout.weight_transfer import WeightReceiver

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

FLUSH_S = 5.0
Send = Callable[[Reply], None]


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs; ``generation_config="vllm"`` keeps the folder's defaults out."""
    return {
        "model": settings.model_folder,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enable_chunked_prefill": settings.chunked_prefill,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "hf_overrides": {"head_dtype": "float32"} if settings.float32_head else {},
    }


def sampling_fields(values: SamplingValues, seed: int) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams, all of them stated (TRAPS H34).

    ``ignore_eos`` switches off the end tokens that vLLM reads from generation_config.json by itself:
    what stops a response is exactly `values.stop_token_ids`.
    """
    return {
        "n": 1,
        "temperature": values.temperature,
        "top_p": values.top_p,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "max_tokens": values.max_tokens,
        "min_tokens": values.min_tokens,
        "stop": [],
        "stop_token_ids": list(values.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "skip_clone": True,
    }


def build_engine(settings: EngineSettings) -> LLMEngine:
    """An engine in this process, with the weights of the model folder."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**engine_arguments(settings)))


def replace_weights(engine: LLMEngine, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load a whole model of HF-named tensors and drop what was computed with the old one.

    Raises:
        RolloutError: the engine has parameters that no tensor set, or a cache could not be emptied.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def load(model: nn.Module) -> set[str]:
        parameters = {name for name, _ in model.named_parameters()}
        initialize_layerwise_reload(model)
        loaded = model.load_weights(tensors)  # type: ignore[operator]
        finalize_layerwise_reload(model, engine.vllm_config.model_config)
        return parameters - set(loaded) - repack_tied_lm_head(model)

    (missing,) = engine.apply_model(load)
    if missing:
        raise RolloutError(
            f"weight sync: the engine's parameters {sorted(missing)[:3]} were set by no tensor"
        )
    drop_prefix_cache(engine)


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


@dataclass
class _Group:
    """Responses to one prompt, None until finished."""

    version: int | None
    outputs: list[tuple[NDArray[np.int32], NDArray[np.float32], str] | None]


@dataclass
class _Call:
    started: float = field(default_factory=time.monotonic)
    groups: dict[int, _Group] = field(default_factory=dict)
    tokens: int = 0


class EngineDriver:
    """Commands in, engine steps, replies out."""

    def __init__(
        self, engine: LLMEngine, make_params: Callable[..., Any], receiver: WeightReceiver, send: Send
    ) -> None:
        self._engine, self._make_params, self._receiver, self._send = engine, make_params, receiver, send
        self._calls: dict[int, _Call] = {}
        self._version: int | None = None

    def serve(self, conn: Connection) -> None:
        """Until Shutdown; EOFError when the trainer is gone, so that an idle wait needs no deadline."""
        while True:
            if conn.poll(0.0 if self._engine.has_unfinished_requests() else None):
                command: Command = conn.recv()
                if isinstance(command, Shutdown):
                    return
                self.handle(command)
            else:
                self._collect(self._engine.step())

    def handle(self, command: Command) -> None:
        """Start, stop or do what is asked."""
        match command:
            case Generate():
                self._generate(command)
            case Abort():
                self._abort(command.call)
            case LoadWeights():
                self._load_weights(command)

    def _generate(self, command: Generate) -> None:
        call = self._calls[command.call] = _Call()
        for prompt in command.prompts:
            call.groups[prompt.index] = _Group(self._version, [None] * len(prompt.seeds))
            try:
                self._add(command, prompt)
            except Exception as error:  # whatever the engine has against this prompt, the others go on
                self._fail(command.call, prompt.index, type(error).__name__, str(error))
        self._finish_if_empty(command.call)

    def _add(self, command: Generate, prompt: PromptRequest) -> None:
        ids = prompt.ids.tolist()
        for sample, seed in enumerate(prompt.seeds.tolist()):
            params = self._make_params(**sampling_fields(command.sampling, seed))
            request_id = _request_id(command.call, prompt.index, sample)
            self._engine.add_request(request_id, {"type": "token", "prompt_token_ids": ids}, params)

    def _collect(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            number, index, sample = (int(part) for part in output.request_id.split("/"))
            call = self._calls.get(number)
            if not output.finished or call is None or index not in call.groups:
                continue
            response = output.outputs[0]
            if response.finish_reason not in ("stop", "length"):
                self._fail(
                    number, index, "RequestError", f"sample {sample} ended with {response.finish_reason!r}"
                )
            else:
                self._store(number, call, index, sample, response)
            self._finish_if_empty(number)

    def _store(self, number: int, call: _Call, index: int, sample: int, response: Any) -> None:
        ids = np.asarray(response.token_ids, dtype=np.int32)
        logprobs = np.asarray(response.logprobs.logprobs, dtype=np.float32)
        call.groups[index].outputs[sample] = (ids, logprobs, response.finish_reason)
        call.tokens += len(ids)
        done = [output for output in call.groups[index].outputs if output is not None]
        if len(done) < len(call.groups[index].outputs):
            return
        version = call.groups.pop(index).version
        all_ids, all_logprobs, reasons = zip(*done, strict=True)
        lengths = np.asarray([len(ids) for ids in all_ids], dtype=np.int64)
        self._send(
            GroupDone(
                number,
                index,
                version,
                np.concatenate(all_ids),
                np.concatenate(all_logprobs),
                lengths,
                reasons,
            )
        )

    def _fail(self, number: int, index: int, error: str, message: str) -> None:
        group = self._calls[number].groups.pop(index)
        self._engine.abort_request(
            [_request_id(number, index, sample) for sample in range(len(group.outputs))]
        )
        self._send(PromptFailed(number, index, error, message))

    def _abort(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            left = [
                (index, sample)
                for index, group in call.groups.items()
                for sample in range(len(group.outputs))
            ]
            self._engine.abort_request([_request_id(number, index, sample) for index, sample in left])
            call.groups.clear()
            self._finish_if_empty(number)

    def _finish_if_empty(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None and not call.groups:
            del self._calls[number]
            self._send(CallDone(number, call.tokens, time.monotonic() - call.started))

    def _load_weights(self, command: LoadWeights) -> None:
        started = time.monotonic()
        self._version = None  # a failed sync leaves no version in force
        try:
            if self._engine.has_unfinished_requests():
                raise RolloutError("weight sync: responses are still being generated")
            replace_weights(self._engine, self._receiver.tensors(command.entries))
        except Exception as error:  # crosses the pipe as data; the sampler stops the run
            self._send(WorkerError(command.call, type(error).__name__, str(error), fatal=False))
            return
        self._version = command.version
        seconds = time.monotonic() - started
        self._send(WeightsLoaded(command.call, command.version, len(command.entries), seconds))


def _request_id(call: int, index: int, sample: int) -> str:
    return f"{call}/{index}/{sample}"


class Outbox:
    """Sends replies from a thread, so that a trainer that is busy never holds up the engine."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        self._queue: SimpleQueue[Reply | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, reply: Reply) -> None:
        """Queue one reply."""
        self._queue.put(reply)

    def close(self) -> None:
        """Wait for what is queued, at most FLUSH_S seconds."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)

    def _run(self) -> None:
        while (reply := self._queue.get()) is not None:
            try:
                self._conn.send(reply)
            except OSError:  # the trainer is gone; the main thread sees the end of the pipe
                return


def run(control: int, weights: int) -> int:
    """Build the engine and serve the control pipe until it ends; both arguments are file descriptors."""
    conn = Connection(control)
    outbox = Outbox(conn)
    try:
        started = time.monotonic()
        engine = build_engine(conn.recv())
        import vllm

        driver = EngineDriver(engine, vllm.SamplingParams, WeightReceiver(weights), outbox.send)
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
