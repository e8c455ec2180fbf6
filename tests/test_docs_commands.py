"""Every command in the documentation runs as written; some run with shorter settings.

Commands that are not in the tables below are run.
"""

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
import torch.distributed.run
import typer.main
from test_docs import PAGES, ROOT
from traces import plan_for, record
from typer.testing import CliRunner

from ultraep import Topology, policies, read_trace
from ultraep.trace.flight import FlightFile
from ultraep_tools import imports
from ultraep_tools.cli.commands import app
from ultraep_tools.sim import workload

# SGLang's own commands start servers; make test-sglang does that.
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(ultraep|make|python(?! -m sglang)|torchrun|pip|tensorboard)(?= |$)"
)
# Options that make commands faster: fewer microbatches, with the same layers and ranks.
SHORTER = {
    "advise": ["--steps", "1", "--microbatches", "1"],
    "inspect": ["--tokens", "64", "--window", "32", "--sequence-length", "16"],
}
# Only the options of these commands are checked, for this reason.
NOT_RUN = {
    "ultraep inspect models": "needs a downloaded checkpoint; tests/inspect uses small ones",
    "ultraep view run": "serves until it is stopped; tests/cli/test_view.py and tests/view run it",
    "ultraep demo": "takes minutes; tests/demo runs it",
    "python examples/": "takes minutes; test_examples.py and test_pretrain.py run it at small size",
    "torchrun": "takes minutes; test_examples.py and test_pretrain.py run it at small size",
    "python benchmarks/": "takes minutes; test_benchmarks.py runs it at toy size",
    "make": "installs an environment; the target must be in the Makefile",
    "pip": "changes the environment; the extras must be in pyproject.toml",
    "tensorboard": "another program, which serves until it is stopped",
}


def commands_of(page):
    """Commands in code blocks, also indented ones, and the beginning of commands in sentences."""
    text = re.sub(r"```(?:python|text|toml)\n.*?```", "", page.read_text(), flags=re.DOTALL)
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    for line in filter(PROGRAM.match, lines):
        yield re.sub(r"\s+#.*", "", line)
    for span in filter(PROGRAM.match, re.findall(r"`([^`\n]+)`", prose)):
        if " " in span:
            yield f"{span} --help" if span.startswith("ultraep ") else span


@cache
def commands():
    known = {}
    for page in PAGES:
        for command in commands_of(page):
            known.setdefault(" ".join(command.replace("...", "").split()), page.name)
    return known


def reason_not_to_run(command):
    program = re.sub(r"^([A-Z_]+=\S+ )+", "", command)
    return next((why for start, why in NOT_RUN.items() if program.startswith(start)), None)


def failures(check, chosen):
    failed = []
    for command in chosen:
        words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
        try:
            check(words)
        except (AssertionError, SystemExit) as error:
            failed.append(f"{commands().get(command)}: {command}: {error}")
    return failed


def code_of(page, first_line):
    text = (ROOT / "docs" / page).read_text()
    return text[text.index(first_line) :].partition("```")[0]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a command in a folder with the files that the documentation names."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "loads.npy", rng.integers(0, 99, (64, 256)))
    (tmp_path / "shed.py").write_text(code_of("policies.md", "# shed.py"))
    np.savez(tmp_path / "routing.npz", text_ids=rng.integers(0, 32, (4096, 24, 4), dtype=np.uint8))
    topology = Topology(ranks=8, experts=32)
    plans = [plan_for(seed, topology) for seed in range(12)]
    record(tmp_path / "run", plans, topology=topology, layers=2)
    flight = FlightFile("ab12", 0, 2, 0, "host", 1, "error", 1.0, (), "", ())
    (tmp_path / "flight").mkdir()
    (tmp_path / "flight" / "rank-00000.json").write_text(flight.as_json())
    trace = "benchmarks/results/trace_train_ep8_h200_202611.npz"
    (tmp_path / trace).parent.mkdir(parents=True)
    read_trace(ROOT / trace).take(np.arange(60)).save(tmp_path / trace)  # the first steps
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    monkeypatch.setenv(imports.VARIABLE, "")  # --import sets it
    monkeypatch.setattr(workload, "PROBES", 1)  # fits loads to one microbatch per layer

    def run(words):
        assert words[0] == "ultraep", "add this command to a table in this file"
        shorter = next((SHORTER[word] for word in words if word in SHORTER), [])
        result = CliRunner().invoke(app, [*words[1:], *shorter])
        assert result.exit_code == 0, result.stderr or result.exception

    return run


@pytest.mark.slow
def test_commands_run(run):
    chosen = [command for command in commands() if reason_not_to_run(command) is None]
    assert len(chosen) >= 10
    assert failures(run, chosen) == []


EXTRAS = ("datasets", "megatron", "trl")  # of examples; their own tests skip without them


class Parsed(Exception):
    """Raised when the options of a script are parsed."""


def parse_script(words):
    script = ROOT / words[0]
    if script.name == "first.py":
        return  # no options; test_examples.py runs it
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(*args):
        parse_args(*args)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch, suppress(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(sys, "argv", [str(script), *words[1:]])
        patch.syspath_prepend(script.parent)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] not in EXTRAS:
                raise
            return
        raise AssertionError("the script parses no options")


def parse_torchrun(words):
    options = torch.distributed.run.get_args_parser().parse_args(words)
    if options.module:
        assert options.training_script == "ultraep"
        parse_ultraep(options.training_script_args)
    else:
        parse_script([options.training_script, *options.training_script_args])


def parse_ultraep(words):
    group = typer.main.get_command(app)
    context = group.make_context("ultraep", words, resilient_parsing=True)
    name, command, rest = group.resolve_command(context, words)
    command.make_context(name, [word for word in rest if word != "--help"])  # exits on errors


def parse_make(words):
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(words) <= set(" ".join(rules).split())


def parse_pip(words):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"\[(\w+)\]", " ".join(words))) <= set(project["optional-dependencies"])


PARSERS = {
    "ultraep": parse_ultraep,
    "python": parse_script,
    "torchrun": parse_torchrun,
    "make": parse_make,
    "pip": parse_pip,
    "tensorboard": lambda words: None,
}


def test_options_exist():
    chosen = [command for command in commands() if reason_not_to_run(command)]
    assert failures(lambda words: PARSERS[words[0]](words[1:]), chosen) == []


def test_all_table_entries_are_used():
    for start in NOT_RUN:
        assert any(command.startswith(start) for command in commands()), start
