"""Every command in the documentation runs as it stands there, some of them in a short form.

A command that stands in no table below is run, or fails here until it is known how to.
"""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch.distributed.run
from traces import plan_for, record
from typer.testing import CliRunner

from ultraep import Topology, read_trace
from ultraep.tools.cli.commands import app
from ultraep.tools.sim import workload

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "integrations").glob("*.md")),
]
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(ultraep|make|python|torchrun|pip|tensorboard)(?= |$)")
# These are simulated with few microbatches, over the same layers and ranks: the rest is time.
SHORTER = {
    "simulate": ["--steps", "1", "--microbatches", "1", "--processes", "1", "--interval", "1"],
    "advise": ["--steps", "1", "--microbatches", "1", "--processes", "1"],
    "inspect": ["--tokens", "64", "--window", "32", "--sequence", "16", "--no-report"],
}
# Only their options are checked, for the reason that is given.
NOT_RUN = {
    "ultraep inspect models": "a checkpoint of somebody else; tests/inspect has small ones",
    "ultraep bench prefill --": "it measures for minutes; tests/serving runs it small",
    "ultraep view run": "it serves until it is ended; tests/cli/test_view.py and tests/view run it",
    "ultraep demo": "it takes minutes; tests/demo runs its parts, at small size, and all of it",
    "python examples/": "it trains for minutes; test_examples.py and test_pretrain.py run it small",
    "torchrun": "it trains for minutes; test_examples.py and test_pretrain.py run it small",
    "python tests/": "a test runs it: test_compile.py",
    "python benchmarks/": "it measures for minutes; test_benchmarks.py runs it at toy size",
    "make": "it sets up an environment; its target must be in the Makefile",
    "pip": "it changes the environment; its extras must be in pyproject.toml",
    "tensorboard": "a program that serves until it is stopped, of another project",
}


def commands_of(page):
    """Lines of code blocks, indented ones too, that begin with a program; without comments."""
    text = re.sub(r"```(?:python|toml)\n.*?```", "", page.read_text(), flags=re.DOTALL)
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (\S.*)$", plain, re.MULTILINE)
    return [re.sub(r"\s+#.*", "", line) for line in lines if PROGRAM.match(line)]


def spans_of(page):
    """Commands inside of sentences: what they name must exist. Some leave something out."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = [span for span in re.findall(r"`([^`\n]+)`", text) if PROGRAM.match(span)]
    return [
        f"{span} --help" if span.startswith("ultraep ") else span for span in found if " " in span
    ]


def cases():
    known = {}
    for page in PAGES:
        for command in [*commands_of(page), *spans_of(page)]:
            known.setdefault(" ".join(command.replace("...", "").split()), page.name)
    return [pytest.param(command, id=f"{page}: {command}") for command, page in known.items()]


def reason_not_to_run(command):
    return next((why for start, why in NOT_RUN.items() if command.startswith(start)), None)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the documentation names."""
    folder = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    np.save(folder / "loads.npy", rng.integers(0, 99, (64, 256)))
    np.savez(folder / "routing.npz", text_ids=rng.integers(0, 32, (4096, 24, 4), dtype=np.uint8))
    topology = Topology(ranks=8, experts=32)
    plans = [plan_for(seed, topology) for seed in range(12)]
    record(folder / "run", plans, topology=topology, layers=2)
    trace = "benchmarks/results/trace_train_ep8_h200_202611.npz"
    (folder / trace).parent.mkdir(parents=True)
    read_trace(ROOT / trace).take(np.arange(60)).save(folder / trace)  # the first steps
    return folder


@pytest.mark.parametrize("command", cases())
def test_a_command_of_the_documentation_works(command, place, monkeypatch):
    check(command, place, monkeypatch)


def check(command, place, monkeypatch):
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    if reason_not_to_run(command):
        check_options(words, monkeypatch)
        return
    monkeypatch.chdir(place)
    monkeypatch.setattr(workload, "PROBES", 1)  # loads are fitted by one microbatch of each layer
    assert words[0] == "ultraep", f"say in this file how to check: {command}"
    result = CliRunner().invoke(app, [*words[1:], *SHORTER.get(words[1], [])])
    assert result.exit_code == 0, result.stderr or result.exception


# -- options -------------------------------------------------------------------------------------


def check_options(words, monkeypatch):
    checks = {
        "ultraep": parse_ultraep,
        "python": parse_script,
        "torchrun": parse_torchrun,
        "make": parse_make,
        "pip": parse_pip,
        "tensorboard": lambda words, _: None,
    }
    checks[words[0]](words[1:], monkeypatch)


def parse_ultraep(words, _):
    import typer.main

    group = typer.main.get_command(app)
    context = group.make_context("ultraep", words, resilient_parsing=True)
    name, command, rest = group.resolve_command(context, words)
    command.make_context(name, [word for word in rest if word != "--help"])  # exits if it cannot


class Parsed(Exception):
    """The options of a script are fine."""


def parse_script(words, monkeypatch):
    """Run a script up to where it has parsed its options."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, args=None, namespace=None):
        parse(parser, args, namespace)
        raise Parsed

    script = ROOT / words[0]
    if script.name == "bench_megatron.py":  # which needs it to begin
        pytest.importorskip("megatron.core")
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [str(script), *words[1:]])
    monkeypatch.syspath_prepend(script.parent)
    with pytest.raises(Parsed):
        runpy.run_path(str(script), run_name="__main__")


def parse_torchrun(words, monkeypatch):
    options = torch.distributed.run.get_args_parser().parse_args(words)
    if options.module:
        assert options.training_script == "ultraep"
        parse_ultraep(options.training_script_args, monkeypatch)
    else:
        parse_script([options.training_script, *options.training_script_args], monkeypatch)


def parse_make(words, _):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(words) <= set(targets)


def parse_pip(words, _):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for named in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert named in extras


# -- the tables ----------------------------------------------------------------------------------


def test_commands_are_found():
    found = [case.values[0] for case in cases()]
    assert "ultraep env" in found
    assert "make demo" in found
    assert sum(reason_not_to_run(command) is None for command in found) >= 10


def test_no_reason_is_left_over():
    found = [case.values[0] for case in cases()]
    for start in NOT_RUN:
        assert any(command.startswith(start) for command in found), start


def test_a_command_that_is_wrong_fails(place, monkeypatch):
    for command in (
        "ultraep advise --cluster h200-nvl8 --model gpt-oss-120b --ep 8 --trace routing.npz",
        "ultraep plan loads.npy --rank 64",
        "ultraep trace inform run",
    ):
        with pytest.raises(AssertionError):
            check(command, place, monkeypatch)
    with pytest.raises(SystemExit):
        check_options(["python", "benchmarks/bench_plan.py", "--quickly"], monkeypatch)


def test_the_makefile_says_what_it_would_do():
    for target in ("demo", "test"):
        made = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )
        assert made.stdout
