"""`ultraep plan`: what it reads, refuses, prints and promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import ultraep
import ultraep.tools.cli
from ultraep import workload
from ultraep.tools.cli import plan as plan_command
from ultraep.tools.cli import render
from ultraep.tools.cli.commands import SUMMARIES, load_command

SOURCE = Path(ultraep.__file__).parent.parent
RANKS, EXPERTS, STEPS = 8, 32, 3
SEQUENCE = workload.topic_shift(RANKS, EXPERTS, steps=STEPS, top_k=4, tokens=200, seed=1)


def invoke(*arguments, width=100):
    environment = {"COLUMNS": str(width), "FORCE_COLOR": None, "TERM": "dumb"}
    return CliRunner().invoke(
        ultraep.tools.cli.app, ["plan", *map(str, arguments)], env=environment
    )


def shell(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "ultraep", *map(str, arguments)],
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | environment,
        timeout=120,
        check=False,
    )


def records(*arguments):
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def npy(tmp_path):
    return save(tmp_path / "loads.npy", SEQUENCE[0])


@pytest.fixture
def sequence(tmp_path):
    return save(tmp_path / "sequence.npy", SEQUENCE)


def save(path, loads):
    np.save(path, np.asarray(loads))
    return path


# -- what it refuses -----------------------------------------------------------------------------


def text(path, content):
    path.write_text(content)
    return path


BAD_FILES = {  # more of them in tests/workload/test_files.py
    "missing": (lambda d: d / "none.npy", "no such file"),
    "suffix": (lambda d: text(d / "loads.txt", "1,2"), "unknown format '.txt'"),
    "newline": (lambda d: d / "two\nlines.npy", "two lines.npy: no such file"),
    "ragged_csv": (lambda d: text(d / "a.csv", "1,2\n3\n"), "line 2: 1 columns"),
    "negative": (
        lambda d: save(d / "a.npy", [[3, -1], [0, 2]]),
        "microbatch 0: loads must not be negative, got -1 for source rank 0, expert 1",
    ),
    "too_many_tokens": (lambda d: save(d / "a.npy", [[2**31, 0], [0, 0]]), "2147483647"),
    "uneven": (lambda d: save(d / "a.npy", np.ones((4, 6), int)), "6 experts do not divide"),
}
BAD_OPTIONS = {
    "ranks": (["--ranks", "4"], "--ranks is 4, but the file has loads of 8"),
    "slots": (["--slots", "-1"], "slots must lie between 0 and 32, got -1"),
    "domain": (["--domain", "3"], "8 ranks do not divide by a domain of 3"),
    "policy": (["--policy", "magic"], "unknown policy 'magic'; known are none, ultraep"),
    "no_policy": (["--policy", " , "], "--policy must name at least one"),
    "second_policy": (["--policy", "none,magic"], "unknown policy 'magic'"),
    "backend": (
        ["--backend", "abacus"],
        "unknown backend 'abacus'; known are triton, cpu",
    ),
    "tolerance": (["--tolerance", "nan"], "tolerance must lie between 0 and 1000, got nan"),
    "rates": (["--rates", "row=fast"], "rates are row=PICOSECONDS,copy=PICOSECONDS"),
    "min_tokens": (["--min-tokens", "0"], "at least 1, got 0"),
    "max_replicas": (["--max-replicas", "-2"], "at least 0, got -2"),
    "history": (["--history", "0"], "--history must be at least 1, got 0"),
    "show": (["--show", "1"], "--show must lie in 0..0, got 1"),
}


def assert_one_line(result, expected):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("ultraep: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.endswith("\n")
    assert expected in result.stderr


@pytest.mark.parametrize(("make", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_one_line_on_stderr(tmp_path, make, expected):
    assert_one_line(invoke(make(tmp_path)), expected)


@pytest.mark.parametrize(("options", "expected"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option_is_one_line_on_stderr(npy, options, expected):
    assert_one_line(invoke(npy, *options), expected)


def test_a_bad_file_is_one_line_in_a_shell(tmp_path):
    result = shell("plan", tmp_path / "none.npy")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"ultraep: ")
    assert result.stderr.count(b"\n") == 1


def test_a_setting_that_a_policy_cannot_honour_is_one_line(npy):
    assert_one_line(invoke(npy, "--policy", "eplb", "--max-replicas", "3"), "eplb")


def test_an_unexpected_error_stays_a_traceback(npy, monkeypatch):
    def broken(path, **_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(plan_command, "read_series", broken)
    assert isinstance(invoke(npy).exception, RuntimeError)


def test_ctrl_c_is_one_line(npy, monkeypatch):
    def interrupted(path, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "read_series", interrupted)
    result = invoke(npy)
    assert (result.exit_code, result.output) == (130, "ultraep: interrupted\n")


# -- what it prints ------------------------------------------------------------------------------


def test_json_is_what_the_library_says(sequence):
    options = ["--slots", "2", "--domain", "4", "--tolerance", "0.02", "--min-tokens", "5"]
    found = records(sequence, *options, "--max-replicas", "6", "--no-locality", "--ranks", "8")
    topology = ultraep.Topology(ranks=RANKS, experts=EXPERTS, slots=2, domain=4)
    config = ultraep.BalanceConfig(
        tolerance=0.02, min_tokens_per_replica=5, max_replicas=6, locality=False
    )
    assert [record["microbatch"] for record in found] == list(range(STEPS))
    for record, loads in zip(found, SEQUENCE, strict=True):
        plan = ultraep.plan(loads, topology, config)
        plan_us = record.pop("plan_us")
        assert 0 < plan_us < 1e8
        assert record == {
            "microbatch": record["microbatch"],
            "layer": 0,
            "policy": "ultraep",
            "initial_imbalance": plan.initial_imbalance,
            "imbalance": plan.imbalance,
            "lower_bound": plan.lower_bound,
            "num_replicas": plan.num_replicas,
            "max_fanout": plan.max_fanout,
            "max_ingress": plan.max_ingress,
            "max_egress": plan.max_egress,
            "remote_tokens": plan.remote_tokens,
            "total_tokens": int(loads.sum()),
            "time_ps": None,
            "time_without_copies_ps": None,
            "digest": plan.digest(),
            "rank_loads": plan.rank_loads.tolist(),
            "replicas": np.column_stack([plan.replicas, plan.quotas]).tolist(),
        }


@pytest.mark.parametrize("window", [1, 2])
def test_history_is_the_microbatches_before(sequence, window):
    found = records(sequence, "--policy", "eplb", "--history", window)
    topology = ultraep.Topology(ranks=RANKS, experts=EXPERTS)
    config = ultraep.BalanceConfig(policy="eplb")
    for step, record in enumerate(found):
        past = SEQUENCE[max(step - window, 0) : step] if step else SEQUENCE[0]
        assert (
            record["digest"]
            == ultraep.plan(SEQUENCE[step], topology, config, history=past).digest()
        )


def table_of(result):
    """The cells of every line of the table, which ends in a share and a time."""
    _, _, below = result.stdout.partition("───\n")
    return [line.split() for line in below.splitlines() if re.search(r"%\s+[\d.]+$", line)]


def test_policies_stand_side_by_side_with_footnotes(sequence):
    result = invoke(sequence, "--policy", "none,ultraep,eplb,ultraep", width=80)
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [cells[0] for cells in table_of(result)] == ["none", "ultraep", "eplb*"]
    flat = " ".join(result.stdout.split())
    assert f"eplb (3 of {STEPS})" in flat
    assert f"eplb on 1 of {STEPS} microbatches had no past and saw the load itself" in flat
    assert result.stderr == ""


def test_the_worst_microbatch_is_drawn_unless_told(sequence):
    imbalances = [record["initial_imbalance"] for record in records(sequence)]
    worst = imbalances.index(max(imbalances))
    assert f"Microbatch {worst}, the most imbalanced:" in invoke(sequence).stdout
    shown = invoke(sequence, "--show", "1").stdout
    assert "Microbatch 1, as asked for:" in shown
    assert f"before  fullest rank {imbalances[1]:.3f}x the mean" in shown


def test_numbers_in_the_table_are_those_of_the_plan(npy):
    record = records(npy)[0]
    (cells,) = table_of(invoke(npy))
    assert cells[:5] == [
        "ultraep",
        f"{record['initial_imbalance']:.3f}",
        f"{record['imbalance']:.3f}",
        f"{record['lower_bound']:.3f}",
        str(record["num_replicas"]),
    ]
    assert cells[7] == f"{record['remote_tokens'] / record['total_tokens']:.1%}"


def test_more_ranks_than_columns_share_them(tmp_path):
    file = save(tmp_path / "wide.npy", workload.lognormal(192, 192, tokens=64))
    result = invoke(file, width=80)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "fullest of 3 neighbouring ranks" in " ".join(result.stdout.split())
    assert "191" in result.stdout


def test_narrow_terminals_and_empty_loads_do_no_harm(tmp_path):
    file = save(tmp_path / "empty.npy", np.zeros((2, 4), int))
    assert invoke(file, width=20).exit_code == 0
    assert "1.000x the mean" in invoke(file).stdout


def test_terminals_without_blocks_get_ascii(npy):
    result = shell("plan", npy, "--policy", "ultraep,ideal", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"1.00x +###" in result.stdout
    assert result.stdout.isascii()


# -- skyline -------------------------------------------------------------------------------------


def draw(rank_loads, *, width=60, domain=None, glyphs=render.BLOCKS):
    rank_loads = np.asarray(rank_loads)
    scale = render.scale_for(rank_loads.max() / max(rank_loads.mean(), 1))
    picture = render.skyline(
        rank_loads, scale, width=width, domain=domain or len(rank_loads), glyphs=glyphs
    )
    return picture.plain.splitlines()


def test_a_skyline_reaches_as_high_as_the_loads():
    lines = draw([8, 4, 0, 4] * 8)
    assert lines[0].startswith("2.00x ┤█   █")
    assert lines[4].startswith("1.00x ┤██▔██")
    assert lines[7].startswith("      │██ ██")
    assert len(lines) == 10


def test_few_ranks_get_wide_bars_and_domains_ticks():
    lines = draw([2, 2, 2, 2], domain=2)
    assert lines[0] == "1.00x ┤███▔███▔███▔███▔"
    assert lines[-2] == "      └────────┴───────"
    assert lines[-1] == "       rank 0         3"


def test_a_very_hot_rank_keeps_the_picture_low():
    lines = draw([64] + [0] * 63, width=70)
    assert len(lines) == render.HEIGHT + 2
    assert lines[0].startswith("64.0x ┤█")


def test_overfull_parts_are_coloured():
    scale = render.scale_for(2.0)
    text = render.skyline(np.array([8, 0] * 10), scale, width=60, domain=20)
    console = Console(width=80, color_system="standard", force_terminal=True)
    styles = {segment.style.color.name for segment in text.render(console) if "█" in segment.text}
    assert styles == {"red", "cyan"}


@pytest.mark.parametrize("highest", [1.0, 1.04, 1.3, 2.0, 2.996, 4.45, 7.1, 11.9, 40.0])
def test_scales_hold_the_highest_bar_in_a_few_rows(highest):
    scale = render.scale_for(highest)
    assert scale.rows >= highest * scale.rows_to_mean - 1 / 16
    assert 5 <= scale.rows <= 12


# -- promises ------------------------------------------------------------------------------------


def test_rates_say_what_pays(npy):
    """Dear copies are not made, and the page says so; cheap ones are those without rates."""
    dear, cheap = "row=10,copy=1000000000000", "row=10"
    (left,) = json.loads(invoke(npy, "--rates", dear, "--json").stdout)
    assert left["num_replicas"] == 0
    assert left["time_ps"] == left["time_without_copies_ps"] == 10 * max(left["rank_loads"])
    (made,), (usual,) = (
        json.loads(invoke(npy, *options, "--json").stdout) for options in (["--rates", cheap], [])
    )
    assert made["digest"] == usual["digest"]
    assert made["time_ps"] < made["time_without_copies_ps"] == left["time_ps"]
    words = " ".join(invoke(npy, "--rates", dear).stdout.split())
    assert "1 of 1 left alone, no copies would pay" in words


def test_options_are_frozen():
    names = {
        name: sorted(option for parameter in load_command(name).params for option in parameter.opts)
        for name in SUMMARIES
    }
    expected = {  # those of bench and trace are frozen in test_bench.py and test_trace.py
        "plan": "--backend --domain --experts --history --json --max-replicas --min-tokens "
        "--no-locality --policy --ranks --rates --show --slots --tolerance --window "
        "file",
        "bench": "",
        "inspect": "--device --dtype --ep --history --layers --no-report --out --policy --random "
        "--seed --sequence-length --slots --text --tokens --window model",
        "simulate": "--cluster --domain --drift-length --ep --force --groups --imbalance "
        "--interval --json --microbatches --model --no-recompute --noise --objective --pipeline "
        "--plot --policy --prefill --presets --processes --rates --seed --sequence-length "
        "--slots --stages --steps --timeline --timeline-layers --tokens --tolerance "
        "--topic-length --trace",
        "advise": "--cluster --domain --drift-length --ep --groups --imbalance --json "
        "--microbatches --model --no-recompute --noise --objective --pipeline --prefill "
        "--processes --rates --seed --sequence-length --stages --steps --tokens --topic-length "
        "--trace",
        "demo": "--device --no-report --out --policy --quick --ranks --seed --steps",
        "env": "--json",
        "trace": "",
        "view": "--export --force --host --live --open --port paths",
    }
    assert names == {name: options.split() for name, options in expected.items()}


def test_every_option_and_command_is_explained():
    for name, summary in SUMMARIES.items():
        command = load_command(name)
        assert " ".join(command.help.split("\n\n")[0].split()) == summary
        assert "ultraep" in command.epilog
        assert all(parameter.help for parameter in command.params)


def test_help_is_quick():
    code = (
        "import sys; from typer.testing import CliRunner; import ultraep.tools.cli as cli\n"
        "assert CliRunner().invoke(cli.app, ['--help']).exit_code == 0\n"
        "late = {'ultraep.tools.cli.plan', 'ultraep.tools.sim', 'ultraep.trace'}\n"
        "assert not late & set(sys.modules)\n"
        "for command in ['plan'], ['simulate'], ['advise'], ['demo'], ['env'], ['trace'], \\\n"
        "        ['bench', 'prefill'], ['view']:\n"
        "    assert CliRunner().invoke(cli.app, [*command, '--help']).exit_code == 0\n"
        "heavy = {'torch', 'numba', 'scipy', 'matplotlib', 'plotly', 'starlette', 'uvicorn'}\n"
        "assert not heavy & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)


def test_version_and_usage():
    runner = CliRunner()
    assert (
        runner.invoke(ultraep.tools.cli.app, ["--version"]).stdout
        == f"ultraep {ultraep.__version__}\n"
    )
    assert runner.invoke(ultraep.tools.cli.app, ["plan"]).exit_code == 2
    assert runner.invoke(ultraep.tools.cli.app, ["plan", "x.npy", "--slot", "1"]).exit_code == 2
