"""PURE: prompts to what the worker needs, and its arrays back to rollouts."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pnpo_megatron.errors import ConfigError, DataError, RolloutError
from pnpo_megatron.rollout.messages import GroupDone, PromptRequest
from pnpo_megatron.seeds import derive_seed
from pnpo_megatron.types import Prompt, Rollout, RolloutGroup, Sampling

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # vLLM raises lower ones without an error


def check_call(prompts: Sequence[Prompt], group_size: int, sampling: Sampling) -> None:
    """Refuse a call whose responses could not be independent draws (TRAPS H35).

    Raises:
        ConfigError: temperature 0 with groups of more than one, or a temperature the engine would change.
        DataError: two prompts share an id, and so their seeds.
    """
    if sampling.temperature == 0 and group_size > 1:
        raise ConfigError(
            f"temperature = 0 gives {group_size} equal responses; use group_size = 1 or a temperature above 0"
        )
    if sampling.temperature != 0 and not LOWEST_TEMPERATURE <= sampling.temperature <= HIGHEST_TEMPERATURE:
        raise ConfigError(
            f"temperature = {sampling.temperature}: the engine samples at 0, or at "
            f"{LOWEST_TEMPERATURE} to {HIGHEST_TEMPERATURE}"
        )
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise DataError(
                f"prompt id {prompt.id!r} occurs twice in one call: its responses would be equal; "
                "give every prompt its own id"
            )
        seen.add(prompt.id)


def refusal(prompt: Prompt, sampling: Sampling, vocab_size: int, max_model_len: int) -> str:
    """Why the engine would refuse this prompt or cut its response short; empty if it would not."""
    length = len(prompt.token_ids)
    if not length:
        return "the prompt is empty"
    if min(prompt.token_ids) < 0 or max(prompt.token_ids) >= vocab_size:
        return f"a token id lies outside 0..{vocab_size - 1}"
    if length + sampling.max_tokens > max_model_len:
        return (
            f"{length} prompt tokens and max_tokens = {sampling.max_tokens} exceed "
            f"max_model_len = {max_model_len}"
        )
    return ""


def make_request(index: int, prompt: Prompt, group_size: int, seed: tuple[int | str, ...]) -> PromptRequest:
    """One prompt with a seed of its own for every sample: ``derive_seed(*seed, prompt.id, i)``."""
    seeds = [derive_seed(*seed, prompt.id, sample) for sample in range(group_size)]
    ids = np.asarray(prompt.token_ids, dtype=np.int32)
    return PromptRequest(index, ids, np.asarray(seeds, dtype=np.int64))


def unpack_group(
    reply: GroupDone,
    prompt: Prompt,
    seeds: NDArray[np.int64],
    version: int,
    decode: Callable[[Sequence[int]], str],
) -> RolloutGroup:
    """The worker's flat arrays as G rollouts.

    Raises:
        RolloutError: the arrays do not fit together, or a log-prob is not finite.
    """
    if not len(reply.ids) == len(reply.logprobs) == int(reply.lengths.sum()):
        raise RolloutError(
            f"prompt {prompt.id}: {len(reply.ids)} ids and {len(reply.logprobs)} log-probs for responses of "
            f"{reply.lengths.tolist()} tokens"
        )
    if not np.isfinite(reply.logprobs).all():
        raise RolloutError(
            f"prompt {prompt.id}: log-probs that are not finite from weights of version {version}; "
            "the weights are broken"
        )
    read = (len(prompt.token_ids) - 1 + reply.lengths).tolist()
    if reply.routes and [len(one) for one in reply.routes] != read:
        raise RolloutError(
            f"prompt {prompt.id}: routes of {[len(one) for one in reply.routes]} tokens where the engine "
            f"read {read}"
        )
    told: Sequence[torch.Tensor | None] = [
        torch.from_numpy(one.astype(np.uint8 if one.dtype == np.uint8 else np.int16)) for one in reply.routes
    ]
    ends = np.cumsum(reply.lengths)[:-1]
    parts = zip(
        np.split(reply.ids.astype(np.int64), ends),
        np.split(reply.logprobs, ends),
        reply.finish_reasons,
        seeds.tolist(),
        told or [None] * len(reply.lengths),
        strict=True,
    )
    return RolloutGroup(
        prompt,
        tuple(
            Rollout(
                response_ids=torch.from_numpy(ids.copy()),
                rollout_logprobs=torch.from_numpy(logprobs.copy()),
                finish_reason=reason,
                sample=sample,
                seed=seed,
                version=version,
                text=decode(ids.tolist()),
                routes=chosen,
            )
            for sample, (ids, logprobs, reason, seed, chosen) in enumerate(parts)
        ),
    )
