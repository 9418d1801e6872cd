"""Bad input ends with exit code 2 and one line that names the key, what was found and a value that works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_task import make_task, write_config

from pnpo_megatron.cli import main


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"))


def run(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    code = main(["train", str(write_config(task, tmp_path / "run")), *flags])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    assert not (tmp_path / "run").exists(), "nothing is written for a run that cannot start"
    return captured.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rollout.promts=4"], ["rollout.promts", "did you mean rollout.prompts"]),
        (["--model.hf=nowhere"], ["model.hf = nowhere", "no such folder", "config.json"]),
        (["--rollout.temperature=0"], ["rollout.temperature", "1.0 works"]),
        (["--rollout.prompts=3"], ["rollout.prompts = 3", "mini_batch = 2", "use 2 prompts"]),
        (
            ["--rollout.max_response_tokens=60", "--batching.max_tokens=128"],
            ["64", "positions", "56 or less"],
        ),
        (["--rollout.prompts=12"], ["rollout.prompts = 12", "10 usable prompts", "use 10 or fewer"]),
        (["--objective.clip_low=0.2"], ["objective.clip_low", "sqrt"]),
        (["--data.prompts=nowhere.jsonl"], ["nowhere.jsonl", "no such file"]),
        (["--data.template=chat"], ["data.template", "no chat template", "raw"]),
        (["--reward.function=nowhere:reward"], ["reward.function", "nowhere"]),
        (["--eval.temperature=0"], ["eval.samples = 2", "eval.temperature = 0", "samples = 1"]),
        (["--parallel.tensor=3"], ["parallel.tensor", "3"]),
    ],
)
def test_a_wrong_setting_is_named(task, tmp_path, capsys, flags, words):
    message = run(task, tmp_path, capsys, *flags)
    assert all(word in message for word in words), message


def test_an_empty_prompt_file_is_named(task, tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "empty" in run(task, tmp_path, capsys, f"--data.prompts={empty}")


def test_a_malformed_line_is_named_by_its_number(task, tmp_path, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"id": "a", "problem": "1+1=", "answer": "2"}\n{"id": "b"\n')
    assert f"{broken}:2" in run(task, tmp_path, capsys, f"--data.prompts={broken}")


def test_an_unsupported_architecture_is_named(task, tmp_path, capsys):
    config = json.loads((task / "model" / "config.json").read_text())
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(
        json.dumps(config | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    )
    message = run(task, tmp_path, capsys, f"--model.hf={tmp_path / 'gpt2'}")
    assert "model_type = 'gpt2'" in message and "qwen2" in message


def test_a_missing_config_file_is_named(capsys):
    assert main(["train", "nowhere.toml"]) == 2
    assert "nowhere.toml: no such file" in capsys.readouterr().err
