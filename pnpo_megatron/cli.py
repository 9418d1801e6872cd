"""Command line. Exit codes: 0 done, 2 wrong input, 1 anything else, 75 stopped early with a checkpoint."""

import argparse
import errno
import gc
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pnpo_megatron.errors import DONE, FAILED, STOPPED_EARLY, WRONG_INPUT, ConfigError, Fault, UserError
from pnpo_megatron.parallel.rank_zero import PeerError

COMMANDS = {
    "compare": ("study", "settings x seeds at one budget of updates"),
    "serve": ("serve", "one vLLM server for rollouts on this node"),
    "doctor": ("planning.doctor", "versions; whether a job fits a cluster"),
    "report": ("analysis.report", "one self-contained HTML page about one or more runs"),
    "plan-reuse": ("analysis.plan_reuse", "generation and optimizer seconds, speed-up by K, recommended K"),
    "calibrate-gate": ("analysis.calibrate_gate", "tolerances from the log-ratios that a run measured"),
    "compare-eval": (
        "analysis.compare_eval",
        "paired difference of two evaluation results, with its 95 %% interval",
    ),
}
"""Commands whose module has a `main(words)` that knows their flags; it is imported when it is needed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments, overrides = _parser().parse_known_args(argv)
    if overrides and arguments.command == "eval":
        print(
            f"error: {overrides[0]}: unknown argument; see pnpo-megatron {arguments.command} --help",
            file=sys.stderr,
        )
        return WRONG_INPUT
    try:
        run: Callable[[argparse.Namespace, Sequence[str]], int] = arguments.run
        return run(arguments, overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_INPUT
    except (Fault, PeerError) as error:  # anything else shows its traceback
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error}; make room, then start the same command again", file=sys.stderr)
        return FAILED
    finally:
        gc.enable()


def _train(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    gc.disable()  # importing makes objects and hardly any garbage; `run_training` turns it on
    from pnpo_megatron.config import load_config
    from pnpo_megatron.policy.process_groups import leave_distributed
    from pnpo_megatron.run import run_training, write_exit_code

    config = load_config(arguments.config, overrides)
    if int(os.environ.get("RANK", "0")) == 0:
        (config.run.folder / "exit_code").unlink(missing_ok=True)  # of an earlier start
    try:
        complete = run_training(
            config,
            dump_tokens=arguments.dump_tokens,
            profile=arguments.profile,
            chosen=arguments.chosen,
            allow_change=arguments.allow_change,
        )
        code = DONE if complete else STOPPED_EARLY
    except UserError:
        write_exit_code(config.run.folder, WRONG_INPUT)
        raise
    except BaseException:
        write_exit_code(config.run.folder, FAILED)
        raise
    write_exit_code(config.run.folder, code)
    leave_distributed()  # only now: a launcher kills the other ranks as soon as one has left with 75
    return code


def _eval(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    from pnpo_megatron.evaluation import run_evaluation

    if not arguments.benchmark:
        raise ConfigError("--benchmark: missing; give one or more JSON Lines files of {id, problem, answer}")
    run_evaluation(arguments)
    return DONE


def _elsewhere(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    module = importlib.import_module(f"pnpo_megatron.{COMMANDS[arguments.command][0]}")
    return int(module.main(words))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pnpo-megatron", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser(
        "train",
        help="train; resumes by itself if the run folder has a checkpoint",
        epilog="example: pnpo-megatron train examples/arithmetic_cpu/config.toml --steps=20 --seed=7",
    )
    train.add_argument("config", help="TOML file; any setting can be overridden with --section.key=value")
    train.add_argument(
        "--dump-tokens",
        type=int,
        metavar="STEP",
        help="write log-prob, weight and keep of every token of STEP",
    )
    train.add_argument(
        "--profile", type=int, metavar="STEP", help="write a trace of STEP, and a table of where it goes"
    )
    train.add_argument(
        "--from", dest="chosen", default="", metavar="step_NNNNNN", help="go on from this checkpoint"
    )
    train.add_argument("--allow-change", action="store_true", help="resume with settings that change the run")
    train.set_defaults(run=_train)

    score = commands.add_parser(
        "eval",
        help="Avg@k and pass@k with standard errors",
        epilog="example: pnpo-megatron eval --model runs/demo/hf/step_000020 --benchmark heldout.jsonl",
    )
    score.add_argument("--model", type=Path, required=True, help="Hugging Face folder or Megatron checkpoint")
    score.add_argument("--benchmark", action="append", default=[], help="JSON Lines file; may be repeated")
    score.add_argument("--samples", type=int, default=32, help="responses a problem (k)")
    score.add_argument("--temperature", type=float, default=0.7)
    score.add_argument("--top-p", type=float, default=1.0)
    score.add_argument("--max-prompt-tokens", type=int, default=1024)
    score.add_argument("--max-response-tokens", type=int, default=15360)
    score.add_argument("--template", default="chat", help="chat, raw, or a Jinja file")
    score.add_argument("--reward", default="math", help="math or module:function")
    score.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    score.add_argument("--kv-cache-bytes", type=int, help="key-value cache of the engine")
    score.add_argument(
        "--servers", help="http://HOST:PORT,...: sample there and not in a process of this one"
    )
    score.add_argument("--seed", type=int, default=42)
    score.add_argument("--out", type=Path, help="folder for scores and samples; default runs/eval/MODEL")
    score.add_argument("--overwrite", action="store_true", help="replace scores of other settings in --out")
    score.set_defaults(run=_eval)
    for name, (_, words) in COMMANDS.items():
        commands.add_parser(name, help=words, add_help=False).set_defaults(run=_elsewhere)
    return parser
