"""One vLLM server: what is asked of it over HTTP, and what its silence means."""

import asyncio
from base64 import b64decode
from collections.abc import Mapping
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from pydantic_core import from_json

from pnpo_megatron.errors import ConfigError
from pnpo_megatron.rollout.messages import GroupDone, PromptRequest, Response
from pnpo_megatron.rollout.settings import EngineSettings
from pnpo_megatron.rollout.vllm_worker import sampling_fields
from pnpo_megatron.rollout.weight_network import BACKEND
from pnpo_megatron.types import Sampling

HEALTH_S = 10.0
"""A server that is well answers `/health` at once, even while it generates: its engine is another process."""
NEEDED: dict[tuple[str, str], Any] = {
    ("model_config", "logprobs_mode"): "processed_logprobs",
    ("model_config", "generation_config"): "vllm",
    ("weight_transfer_config", "backend"): BACKEND,
}
"""Settings of a server without which log-probs or weights would be wrong."""
NO_NUMBER = -9999.0
"""vLLM sends this in place of a log-prob that is NaN or minus infinity: JSON has neither."""


class ServerLost(Exception):
    """It does not answer, or gave up; `certain` if there is no need to ask it again."""

    def __init__(self, reason: str, *, certain: bool = False) -> None:
        super().__init__(reason)
        self.certain = certain


class ServerRefused(Exception):
    """It answered, and the answer is no."""


class Server:
    """One server, by its address."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self.url, self.host = url, urlsplit(url).hostname or ""
        self._client = client
        self.owes = 0
        """Responses that it was asked for and has not sent."""
        self.trouble = "does not answer"
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once nothing is asked of it any more."""

    @property
    def state(self) -> str:
        """In words."""
        return self.trouble or f"owes {self.owes} responses"

    async def health(self) -> None:
        """Raise ServerLost unless server and engine are well."""
        await self._ask("GET", "/health", HEALTH_S)

    async def check_settings(self, engine: EngineSettings) -> str:
        """Its vLLM version, if it was started for this; ConfigError says what is wrong otherwise."""
        try:
            reply = await self._ask("GET", "/server_info", None, params={"config_format": "json"})
            info, needed = reply["vllm_config"], NEEDED | {("model_config", "dtype"): f"torch.{engine.dtype}"}
            if engine.routes:
                needed |= {("aux_output_config", "enable_return_routed_experts"): True}
            found = {key: info[key[0]][key[1]] for key in needed}
            longest = int(info["model_config"]["max_model_len"])
            version = str((await self._ask("GET", "/version", HEALTH_S))["version"])
            wrong = [f"{key[1]} = {found[key]!r} instead of {needed[key]!r}" for key in needed
                     if found[key] != needed[key]]  # fmt: skip
            if longest < engine.max_model_len:
                wrong.append(f"max_model_len = {longest}, of which {engine.max_model_len} are needed")
        except (ServerRefused, KeyError, TypeError, ValueError) as error:
            wrong, version = [f"settings that it does not tell ({error!r})"], ""
        if wrong:
            raise ConfigError(
                f"rollout.servers: {self.url} was not started by `pnpo-megatron serve` with these settings; "
                f"it has {', '.join(wrong)}"
            )
        return version

    async def group(self, call: int, prompt: PromptRequest, sampling: Sampling, weights: str) -> GroupDone:
        """All responses to one prompt, by the weights named so; `version` is left to the caller.

        Raises:
            ServerLost, ServerRefused: no group, and nothing of it is left in the server.
        """
        ids = prompt.ids.tolist()
        parts = [
            asyncio.create_task(self._response(ids, sampling_fields(sampling, seed), weights))
            for seed in prompt.seeds.tolist()
        ]
        whole = asyncio.gather(*parts)
        whole.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody looks
        try:
            ends: set[asyncio.Future[Any]] = {whole, self.gone}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise ServerLost(self.gone.result(), certain=True)
            return GroupDone.of(call, prompt.index, None, whole.result())
        finally:
            whole.cancel()
            for part in parts:  # closes the connection, at which the server forgets the request
                part.cancel()

    async def _response(self, ids: list[int], fields: Mapping[str, Any], weights: str) -> Response:
        body = {"token_ids": ids, "sampling_params": fields}
        reply = await self._ask("POST", "/inference/v1/generate", None, json=body)
        try:
            (choice,) = reply["choices"]
            tokens = np.asarray(choice["token_ids"], dtype=np.int32)
            logprobs = np.asarray([one["logprob"] for one in choice["logprobs"]["content"]], dtype=np.float32)
            reason, spans = str(choice["finish_reason"]), choice["weight_versions"]
            packed = choice.get("routed_experts")
            routes = packed and np.load(BytesIO(b64decode(packed)), allow_pickle=False)
            held = {str(span["version"]) for span in spans}
        except (KeyError, TypeError, ValueError) as error:
            raise ServerRefused(f"gave no usable response: {error!r}") from error
        if reason == "abort":
            raise ServerLost("it dropped a request")
        if reason not in ("stop", "length"):
            raise ServerRefused(f"a response ended with {reason!r}")
        if held != {weights}:
            raise ServerLost(
                f"it holds weights {sorted(held)}, not {weights!r}: started again?", certain=True
            )
        finite = np.where(logprobs <= NO_NUMBER, np.float32("nan"), logprobs)
        return Response(tokens, finite, reason, routes)

    async def open_update(self, timeout_s: float) -> None:
        """Pause generation, which stays so until `close_update`, and make ready for `update`."""
        await self._ask("POST", "/pause", timeout_s, params={"mode": "abort"})
        try:
            await self._ask("POST", "/start_weight_update", timeout_s)
        except ServerLost:  # a trainer that died in a sync left one open
            await self._ask("POST", "/finish_weight_update", timeout_s)
            await self._ask("POST", "/start_weight_update", timeout_s)

    async def update(self, info: Mapping[str, Any], timeout_s: float) -> None:
        """Have every worker take what `info` tells of (`vllm_transfer.UpdateInfo`)."""
        await self._ask("POST", "/update_weights", timeout_s, json={"update_info": info})

    async def close_update(self, weights: str, timeout_s: float) -> None:
        """Empty the cache, go on, and check that the engine names its weights so (TRAPS H32)."""
        await self._ask("POST", "/finish_weight_update", timeout_s, json={"weight_version": weights})
        await self._ask("POST", "/reset_prefix_cache", timeout_s)
        await self._ask("POST", "/resume", timeout_s)
        held = (await self._ask("GET", "/weight_info", timeout_s)).get("weight_version")
        if held != weights:
            raise ServerRefused(f"holds weights {held!r} after a sync to {weights!r}")

    async def workers(self, timeout_s: float) -> int:
        """Processes that hold a part of the model."""
        return int((await self._ask("GET", "/get_world_size", timeout_s))["world_size"])

    async def join(self, invitation: Mapping[str, Any], timeout_s: float) -> None:
        """Have every worker join a `Broadcaster`'s communicator."""
        await self._ask(
            "POST", "/init_weight_transfer_engine", timeout_s, json={"init_info": dict(invitation)}
        )

    async def _ask(self, method: str, route: str, timeout_s: float | None, **content: Any) -> dict[str, Any]:
        """JSON of the reply; every request has a connection of its own, so a closed one is never met.

        `timeout_s` None: the caller has its deadline, and the watch over `/health` notices silence.
        """
        timeout = httpx.Timeout(timeout_s, connect=HEALTH_S)
        try:
            reply = await self._client.request(method, self.url + route, timeout=timeout, **content)
        except httpx.TransportError as error:
            certain = isinstance(error, httpx.ConnectError)
            raise ServerLost(f"{type(error).__name__} {error}".strip(), certain=certain) from error
        if reply.status_code >= 500:
            raise ServerLost(f"HTTP {reply.status_code}: {_message(reply)}")
        if reply.status_code != 200:
            raise ServerRefused(f"HTTP {reply.status_code}: {_message(reply)}")
        try:
            value = from_json(reply.content) if reply.content else {}  # 16 million tokens: twice as fast
        except ValueError as error:
            raise ServerRefused(f"{route}: not JSON: {reply.text[:200]!r}") from error
        if not isinstance(value, dict):
            raise ServerRefused(f"{route}: expected an object: {reply.text[:200]!r}")
        return value


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:500]
