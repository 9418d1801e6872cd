"""The real engine against transformers in float32. One engine a model family, both started at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_models import POSITIONS, VOCAB, hf_logprobs, hf_tensors, save_qwen2, save_tied_llama
from torch import Tensor

from pnpo_megatron.errors import ConfigError, DataError, RolloutError
from pnpo_megatron.rollout import weight_transfer
from pnpo_megatron.rollout.settings import EngineSettings, SamplerSettings
from pnpo_megatron.rollout.vllm_sampler import VllmSampler
from pnpo_megatron.types import Prompt, RolloutGroup, Sampling

pytestmark = pytest.mark.timeout(400)  # an engine takes 10 s to start on idle cores, a minute on busy ones
SHORT = Prompt("short", (1, 3, 4), "")
LONG = Prompt("long", tuple(3 + i * i % 50 for i in range(300)), "")  # beyond two blocks of the prefix cache
GREEDY = Sampling(0.0, 24)
WARM = Sampling(0.7, 24)
TOLERANCE = 1e-4


@dataclass
class Engine:
    sampler: VllmSampler
    first: Path
    second: Path

    def use(self, folder: Path, version: int = 1) -> None:
        self.sampler.load_weights(hf_tensors(folder).items(), version)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, save in (("untied", save_qwen2), ("tied", save_tied_llama)):
        first, second = save(root / f"{name}_1", 1), save(root / f"{name}_2", 2)
        made[name] = Engine(start(first, root / f"{name}.log"), first, second)
    for engine in made.values():
        engine.sampler.wait_ready()
    yield made
    for engine in made.values():
        engine.sampler.close()


def start(folder: Path, log_path: Path) -> VllmSampler:
    engine = EngineSettings(str(folder), "float32", max_model_len=POSITIONS, kv_cache_memory_bytes=32 * 2**20)
    settings = SamplerSettings(
        engine, lambda ids: " ".join(map(str, ids)), initial_version=0, start_timeout_s=300.0
    )
    return VllmSampler(settings, log_path=log_path)


@pytest.fixture
def engine(engines: dict[str, Engine]) -> Engine:
    """The untied one with its first weights."""
    if engines["untied"].sampler.version != 1:
        engines["untied"].use(engines["untied"].first)
    return engines["untied"]


def sample(
    engine: Engine, prompts: list[Prompt], group_size: int, sampling: Sampling, seed: int = 42
) -> dict[str, RolloutGroup]:
    groups = engine.sampler.generate(prompts, group_size, sampling, (seed,))
    return {group.prompt.id: group for group in groups}


def tokens(group: RolloutGroup) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in group.rollouts]


def logprobs(group: RolloutGroup) -> Tensor:
    return group.rollouts[0].rollout_logprobs


def assert_greedy_choice_of(folder: Path, group: RolloutGroup) -> None:
    rollout = group.rollouts[0]
    expected, greedy = hf_logprobs(folder, group.prompt.token_ids, rollout.response_ids, 1.0)
    assert rollout.response_ids.tolist() == greedy.tolist()
    torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["untied", "tied"])
def test_h32_after_a_sync_the_engine_equals_a_fresh_one(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    assert engine.sampler.version == 0  # fresh: these weights were read from the folder by vLLM itself
    fresh = sample(engine, [SHORT, LONG], 1, GREEDY)
    engine.use(engine.second, version=5)  # the long prompt's cached keys belong to the first weights
    changed = sample(engine, [SHORT, LONG], 1, GREEDY)
    engine.use(engine.first, version=6)
    back = sample(engine, [SHORT, LONG], 1, GREEDY)
    for prompt in ("short", "long"):
        assert_greedy_choice_of(engine.second, changed[prompt])
        assert changed[prompt].rollouts[0].version == 5
        assert tokens(changed[prompt]) != tokens(fresh[prompt])
        assert tokens(back[prompt]) == tokens(fresh[prompt])
        assert torch.equal(logprobs(back[prompt]), logprobs(fresh[prompt]))


def test_h12_h34_logprobs_are_those_of_the_whole_softmax_at_the_sampling_temperature(engine: Engine) -> None:
    groups = sample(engine, [SHORT, LONG], 8, WARM)  # the folder's generation_config asks for top_k = 1
    for group in groups.values():
        for rollout in group.rollouts:
            assert len(rollout.response_ids) == len(rollout.rollout_logprobs) == WARM.max_tokens
            expected, _ = hf_logprobs(engine.first, group.prompt.token_ids, rollout.response_ids, 0.7)
            torch.testing.assert_close(rollout.rollout_logprobs, expected, atol=TOLERANCE, rtol=0)


def test_h35_members_of_a_group_differ_and_each_depends_only_on_its_seed(engine: Engine) -> None:
    others = [Prompt(f"other {i}", (5 + i, 9), "") for i in range(6)]
    alone = sample(engine, [SHORT], 4, WARM)["short"]
    batched = sample(engine, [*others, SHORT], 8, WARM)["short"]
    assert tokens(alone) == tokens(batched)[:4]
    assert len({tuple(ids) for ids in tokens(batched)}) == 8
    assert [rollout.sample for rollout in batched.rollouts] == list(range(8))
    assert len({rollout.seed for rollout in batched.rollouts}) == 8
    assert tokens(sample(engine, [SHORT], 4, WARM, seed=43)["short"]) != tokens(alone)


def test_h08_a_stop_token_is_the_last_of_the_response_and_only_the_callers_stop(engine: Engine) -> None:
    free = sample(engine, [SHORT], 1, Sampling(1.3, 200))["short"].rollouts[0]
    ids = free.response_ids.tolist()
    assert {2, 5, 7} & set(ids[:-1]), "the model folder's own end tokens are among those sampled"
    assert (free.finish_reason, free.truncated, len(ids)) == ("length", True, 200)
    stop = (ids[20], ids[30])
    ended = sample(engine, [SHORT], 1, Sampling(1.3, 200, stop_token_ids=stop))["short"].rollouts[0]
    first = min(ids.index(token) for token in stop)
    assert ended.response_ids.tolist() == ids[: first + 1]
    assert len(ended.rollout_logprobs) == first + 1
    assert (ended.finish_reason, ended.truncated) == ("stop", False)
    assert ended.text == " ".join(map(str, ids[: first + 1]))


def test_a_bad_prompt_is_reported_and_does_not_lose_the_others(engine: Engine) -> None:
    bad = [
        Prompt("empty", (), ""),
        Prompt("outside", (3, VOCAB), ""),
        Prompt("negative", (3, -1), ""),
        Prompt("long", (3,) * (POSITIONS - 10), ""),
    ]
    groups = sample(engine, [bad[0], SHORT, *bad[1:]], 2, WARM)
    assert list(groups) == ["short"] and len(groups["short"].rollouts) == 2
    reasons = engine.sampler.failures
    assert reasons.keys() == {"empty", "outside", "negative", "long"}
    assert "0..63" in reasons["outside"] and "max_model_len = 512" in reasons["long"]
    with pytest.raises(RolloutError, match="all 4 prompts failed.*empty"):
        sample(engine, bad, 2, WARM)


def test_an_invalid_call_is_refused_with_the_reason(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="temperature = 0 gives 2 equal responses"):
        engine.sampler.generate([SHORT], 2, GREEDY, (1,))
    with pytest.raises(DataError, match="'short' occurs twice"):
        engine.sampler.generate([SHORT, SHORT], 2, WARM, (1,))


def with_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors["model.norm.weight"][3] = float("nan")
    return tensors


def without_norm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    del tensors["model.norm.weight"]
    return tensors


def with_extra(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan, "holds NaN"),
        (without_norm, "missing model.norm.weight"),
        (with_extra, r"layers\.2.*not a tensor"),
    ],
)
def test_a_refused_sync_leaves_the_engine_with_its_weights(
    engine: Engine, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    before = sample(engine, [SHORT], 1, GREEDY)["short"]
    with pytest.raises(RolloutError, match=message):  # by then other weights fill the shared buffer
        engine.sampler.load_weights(change(hf_tensors(engine.second)).items(), 9)
    after = sample(engine, [SHORT], 1, GREEDY)["short"]
    assert engine.sampler.version == after.rollouts[0].version == 1
    assert torch.equal(logprobs(before), logprobs(after))


def test_h33_a_sync_that_fails_in_the_engine_leaves_no_version_and_the_next_one_recovers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short inside a layer: vLLM keeps what came of q, and counts it into the next sync's q, k and v."""
    real, name = weight_transfer.describe, "model.layers.1.self_attn.k_proj.weight"

    def describe(tensor_name: str, *rest: object) -> object:
        entry = real(tensor_name, *rest)  # type: ignore[arg-type]
        return replace(entry, checksum=1) if tensor_name == name else entry

    with monkeypatch.context() as patch:
        patch.setattr(weight_transfer, "describe", describe)
        with pytest.raises(RolloutError, match=f"weights of version 8 to load.*{name} changed.*checksum"):
            engine.use(engine.first, version=8)
    with pytest.raises(RolloutError, match="call load_weights"):
        engine.sampler.generate([SHORT], 1, GREEDY, (1,))
    engine.use(engine.second, version=9)
    assert_greedy_choice_of(engine.second, sample(engine, [SHORT], 1, GREEDY)["short"])


def test_groups_arrive_as_they_finish_and_leaving_early_frees_the_engine(engine: Engine) -> None:
    prompts = [Prompt(f"p{i}", (3 + i,), "") for i in range(30)]
    never_read = engine.sampler.generate(prompts, 16, Sampling(1.0, 500), (1,))
    read = engine.sampler.generate(prompts, 2, Sampling(1.0, 500, stop_token_ids=tuple(range(40))), (1,))
    next(read)
    read.close()  # type: ignore[attr-defined]
    started = time.monotonic()
    assert list(sample(engine, [SHORT], 1, GREEDY)) == ["short"]
    assert time.monotonic() - started < 15.0  # 240,000 tokens would take much longer
    with pytest.raises(RolloutError, match="responses were dropped"):
        next(never_read)


def test_prompts_beyond_one_engine_step_are_sampled_as_if_alone(engine: Engine) -> None:
    # 20 * 480 prompt tokens exceed max_num_batched_tokens; on CPUs no seeded prompt may be prefilled in parts
    prompts = [Prompt(f"p{i}", (3 + i, *LONG.token_ids, *LONG.token_ids[:179]), "") for i in range(20)]
    together = sample(engine, prompts, 2, Sampling(1.0, 8))
    alone = sample(engine, prompts[-1:], 2, Sampling(1.0, 8))
    assert len(together) == 20
    assert tokens(together["p19"]) == tokens(alone["p19"])


def test_a_passed_deadline_names_what_was_waited_for_and_the_engine_can_go_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt(f"p{i}", (3 + i,), "") for i in range(30)]
    with monkeypatch.context() as patch:
        patch.setattr(engine.sampler, "settings", replace(engine.sampler.settings, generate_timeout_s=0.3))
        with pytest.raises(RolloutError, match=r"0 of 30 prompts finished \(0.3 s, generate_timeout_s\)"):
            list(engine.sampler.generate(prompts, 16, Sampling(1.0, 500), (1,)))
    assert list(sample(engine, [SHORT], 1, GREEDY)) == ["short"]


def test_a_worker_that_does_not_answer_any_more_passes_its_deadline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(engine.sampler.worker_pid, signal.SIGSTOP)
    try:
        shorter = replace(engine.sampler.settings, generate_timeout_s=0.5)
        monkeypatch.setattr(engine.sampler, "settings", shorter)
        with pytest.raises(RolloutError, match=r"deadline: waited for responses: 0 of 1 prompts finished"):
            sample(engine, [SHORT], 1, GREEDY)
    finally:
        os.kill(engine.sampler.worker_pid, signal.SIGCONT)


def test_a_worker_killed_while_generating_is_started_again_and_gives_the_same_tokens(
    engines: dict[str, Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines["tied"]
    engine.use(engine.second, 2)
    prompts = [LONG, *(Prompt(f"p{i}", (3 + i, 4), "") for i in range(36))]  # more than run side by side
    sampling = Sampling(1.0, 30, min_tokens=30)
    expected = sample(engine, prompts, 8, sampling)
    groups = engine.sampler.generate(prompts, 8, sampling, (42,))
    got = [next(groups)]
    os.kill(engine.sampler.worker_pid, signal.SIGKILL)
    got += groups
    assert "was killed by SIGKILL while waiting for responses" in caplog.text
    assert sorted(group.prompt.id for group in got) == sorted(expected)
    for group in got:
        assert tokens(group) == tokens(expected[group.prompt.id])
        assert {rollout.version for rollout in group.rollouts} == {2}


def test_a_worker_killed_once_too_often_is_an_error_within_two_seconds(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = engines["tied"].sampler
    monkeypatch.setattr(sampler, "_restarts", 0)
    groups = sampler.generate([SHORT, LONG], 32, Sampling(1.0, 200), (1,))
    os.kill(sampler.worker_pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"was killed by SIGKILL while waiting for responses: 0 of 2"):
        list(groups)
    assert time.monotonic() - started < 2.0
    with pytest.raises(RolloutError, match="was killed by SIGKILL"):
        engines["tied"].use(engines["tied"].first)
