"""Settings: every wrong value ends in one line with the key, what was found and what works."""

from __future__ import annotations

from pathlib import Path

import pytest

from pnpo_megatron.config import load_config
from pnpo_megatron.errors import ConfigError

MINIMAL = '[model]\nhf = "model"\n[data]\nprompts = "prompts.jsonl"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(MINIMAL)
    return file


def test_defaults_are_the_papers_four_epoch_run(path):
    config = load_config(path)
    assert (config.seed, config.steps, config.rollout.prompts, config.rollout.group_size) == (42, 150, 256, 8)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_response_tokens) == (1024, 15360)
    assert (config.objective.name, config.objective.epochs, config.objective.mini_batch) == ("pnpo", 4, 64)
    assert (config.optimizer.lr, config.optimizer.warmup_steps, config.optimizer.weight_decay) == (
        1e-6,
        10,
        0.1,
    )
    assert (
        config.steps * config.objective.epochs * config.rollout.prompts // config.objective.mini_batch == 2400
    )


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(path):
    path.write_text(MINIMAL + "[rollout]\nprompts = 128\ngroup_size = 4\n")
    config = load_config(path, ["--rollout.prompts=64", "--optimizer.betas=[0.9,0.95]"])
    assert (config.rollout.prompts, config.rollout.group_size) == (64, 4)
    assert config.optimizer.betas == (0.9, 0.95)


def test_the_resolved_file_loads_to_the_same_settings(path, tmp_path):
    config = load_config(path, ["--rollout.temperature=0.6", "--objective.gate_low=0.01"])
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(config.to_toml())
    assert load_config(resolved) == config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rollout.promts=3"], ["rollout.promts", "rollout.prompts"]),
        (["--nonsense.key=3"], ["nonsense.key", "rollout"]),
        (["--rollout.temperature=0"], ["rollout.temperature", "'0'", "1.0 works"]),
        (["--rollout.temperature=-1"], ["rollout.temperature", "'-1'", "greater than 0"]),
        (["--rollout.prompts=many"], ["rollout.prompts", "'many'", "256 works"]),
        (["--rollout.prompts=65"], ["rollout.prompts = 65", "objective.mini_batch = 64", "use 64 prompts"]),
        (["--rollout.top_p=0.9"], ["rollout.top_p = 0.9", "1.0"]),
        (["--batching.max_tokens=10"], ["batching.max_tokens = 10", "16384"]),
        (["--parallel.sequence=true"], ["parallel.sequence", "parallel.tensor = 1"]),
        (["--parallel.virtual_pipeline=2"], ["parallel.virtual_pipeline = 2", "parallel.pipeline"]),
        (["--objective.name=ppo"], ["objective.name", "'ppo'", "pnpo works"]),
        (["prompts"], ["prompts", "--section.key=value"]),
        (["--rollout.max_lag=1"], ["rollout.max_lag = 1", 'objective.old_logprobs = "rollout"']),
        (["--rollout.max_lag=2", "--objective.old_logprobs=rollout"], ["rollout.max_lag", "2"]),
        (
            ["--rollout.correction=token", "--objective.old_logprobs=rollout"],
            ['rollout.correction = "token"', 'correction = "none"'],
        ),
        (
            ["--rollout.overlong=penalty", "--rollout.overlong_buffer=99999"],
            ["rollout.overlong_buffer = 99999", "15360", "3840"],
        ),
        (["--data.weights=[1.0,2.0]"], ["1 files", "2 weights"]),
    ],
)
def test_a_wrong_value_is_named_in_one_line_with_what_works(path, flags, words):
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data]\nprompts = 'p'\n", ["model", "missing"]),
        (MINIMAL + "[rollout]\nfoo = 3\n", ["rollout.foo", "unknown setting"]),
        ("[model\n", ["not valid TOML"]),
    ],
)
def test_a_broken_file_is_named(path, text, words):
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent.toml")


def test_context_parallel_ranks_share_one_sequence(path):
    config = load_config(path, ["--parallel.context=4", "--batching.max_tokens=4096"])
    assert config.parallel.context == 4
    with pytest.raises(ConfigError, match="use 4096 or more"):
        load_config(path, ["--parallel.context=4", "--batching.max_tokens=4095"])


def test_several_rewards_with_weights_survive_the_resolved_file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(
        '[model]\nhf = "m"\n[data]\nprompts = "p"\n[reward.function]\nmath = 1.0\n"mine:brevity" = 0.2\n'
    )
    config = load_config(path)
    assert config.reward.function == {"math": 1.0, "mine:brevity": 0.2}
    with pytest.raises(ConfigError, match="2 functions in reward.function: a weighted sum does not say"):
        load_config(path, ['--eval.benchmarks=["aime.jsonl"]'])
    path.write_text(config.to_toml())
    assert load_config(path) == config
