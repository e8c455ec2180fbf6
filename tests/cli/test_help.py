"""Options are stable and explained, help is fast, and `ultraep env` has all facts."""

import json
import platform
import subprocess
import sys

import numpy as np
import pytest

import ultraep
from ultraep.backends import BackendInfo
from ultraep_tools.cli import env
from ultraep_tools.cli.commands import SUMMARIES, load_command
from ultraep_tools.sim.planning import OWN

from .commands import flat, invoke, output, records, shell

SCENARIO = (
    "--cluster --data-plane --domain --ep --groups --imbalance --json --microbatches --model "
    "--no-recompute --objective --pipeline --prefill --processes --seed --sequence-length --steps "
    "--tokens --trace"
)
OPTIONS = {
    "plan": "--backend --domain --experts --history --json --policy --ranks --rates --slots "
    "--speeds --tolerance --window file",
    "inspect": "--device --dtype --ep --layers --out --random --sequence-length --slots --text "
    "--tokens --window model",
    "simulate": f"{SCENARIO} --interval --policy --presets --slots --tolerance",
    "advise": SCENARIO,
    "demo": "--no-report --out --policy --quick --ranks --seed --steps",
    "env": "--json",
    "view": "--export --force --live --open --port paths",
    "trace info": "--json path",
    "trace replay": "--ep --history --json --policy --slots --tolerance path",
    "trace place": "--domain --force --out path",
    "trace export": "--csv --force --npz --perfetto path",
}


@pytest.mark.parametrize("line", OPTIONS)
def test_options_are_stable_and_explained(line):
    name, *verb = line.split()
    command = load_command(name)
    for word in verb:
        command = command.commands[word]
    names = {option for parameter in command.params for option in parameter.opts}
    assert names == set(OPTIONS[line].split())
    assert all(parameter.help for parameter in command.params)
    assert "ultraep" in command.epilog
    assert "\n" not in command.help.replace("\n\n", "")  # the terminal breaks lines
    assert "[" not in command.help  # would be markup


@pytest.mark.parametrize("words", [(), ("plan",), ("trace", "info")])
def test_flags_are_shown_without_a_type(words):
    shown = output(*words, "--help")
    assert "--help" in shown
    assert "<bool>" not in shown


def test_summaries_are_those_of_the_commands():
    assert {line.split()[0] for line in OPTIONS} == set(SUMMARIES)
    for name, summary in SUMMARIES.items():
        assert " ".join(load_command(name).help.split("\n\n")[0].split()) == summary


def test_help_is_fast():
    code = (
        "import sys; from typer.testing import CliRunner\n"
        "from ultraep_tools.cli.commands import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "late = {'ultraep_tools.cli.plan', 'ultraep_tools.sim', 'ultraep.trace'}\n"
        "assert not late & set(sys.modules)\n"
        f"for line in {list(OPTIONS)}:\n"
        "    if 'inspect' not in line:\n"
        "        words = [*line.split(), '--help']\n"
        "        assert CliRunner().invoke(app, words).exit_code == 0\n"
        "heavy = {'torch', 'numba', 'scipy', 'matplotlib', 'plotly'}\n"
        "assert not heavy & set(sys.modules)"
    )
    assert shell(program=("-c", code)) == (0, "", "")


def test_version():
    assert invoke("--version").stdout == f"ultraep {ultraep.__version__}\n"


def test_json_holds_all_facts():
    facts = records("env")
    assert facts["ultraep"] == ultraep.__version__
    assert facts["python"].endswith(platform.python_version())
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["backends"] == {"triton": True, "cpu": True, "reference": True}
    assert facts["chosen"] == {"cpu": "cpu", "cuda": "triton"}
    assert set(OWN) <= set(facts["policies"])
    assert facts["cpus"] >= 1
    assert set(facts["torch"]) == {"cuda", "rocm", "available", "devices"}


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(env, "PACKAGES", ("numpy", "no-such-package"))
    missing = BackendInfo("gpu", "cuda", "no_such_module")
    monkeypatch.setattr(env, "BACKENDS", (missing, BackendInfo("reference", "cpu")))
    assert records("env")["chosen"] == {"cpu": "reference", "cuda": "reference"}
    shown = flat("env")
    assert "no-such-package not installed" in shown
    assert "chosen for CPU and GPU tensors" in shown
    assert "not available: needs no_such_module" in shown


@pytest.mark.slow
def test_torchrun_shows_a_map_of_ranks(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*launcher, "--standalone", "-m", "ultraep", "env", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    ranks = json.loads(ran.stdout)["ranks"]  # only rank 0 prints
    assert [(rank["rank"], rank["domain"]) for rank in ranks["map"]] == [(0, 0), (1, 0)]
    assert ranks["domains"] == f"one domain: all ranks are on {platform.node()}"
    assert ranks["not_joined"] == []
