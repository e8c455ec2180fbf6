"""Options are stable and explained, help is fast, and `ultraep env` has all facts."""

import numpy as np
import pytest

import ultraep
from ultraep_tools.cli.commands import SUMMARIES, load_command
from ultraep_tools.sim.planning import OWN

from .commands import flat, invoke, output, records, shell

OPTIONS = {
    "plan": "--backend --domain --history --json --policy --slots --tolerance file",
    "inspect": "--device --dtype --ep --layers --out --random --sequence-length --slots --text "
    "--tokens --window model",
    "advise": "--cluster --domain --ep --groups --imbalance --json --microbatches --model "
    "--no-recompute --pipeline --policy --prefill --presets --seed --sequence-length "
    "--steps --tokens --trace",
    "demo": "--no-report --out --policy --quick --ranks --seed --steps",
    "check": "--dispatcher --experts --failed-hosts --ffn --force --from --hidden --json "
    "--level --model --timeout --tokens --top-k",
    "env": "--json",
    "view": "--export --force --open --port paths",
    "trace info": "path",
    "trace replay": "--ep --history --json --policy --slots path",
    "trace place": "--domain --force --out path",
    "trace export": "--force --npz path",
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


def test_env_has_all_facts():
    facts = records("env")
    assert facts["versions"]["ultraep"] == ultraep.__version__
    assert facts["versions"]["numpy"] == np.__version__
    assert set(OWN) <= set(facts["policies"])
    assert "kernels" not in facts
    shown = flat("env")
    assert f"ultraep {ultraep.__version__}" in shown
    assert "no GPU" in shown
    assert "lplb" in shown
