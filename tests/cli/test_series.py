"""`ultraep plan` of traces and of recorded routing: counted, never taken for loads."""

import json

import numpy as np
import pytest
from traces import plan_for, record
from typer.testing import CliRunner

from ultraep import ConfigError, FileError, read_trace, workload
from ultraep.tools.cli import app
from ultraep.tools.cli.plan import Series, read_series

LAYERS, TOP_K, EXPERTS = 3, 2, 8


def invoke(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.fixture
def routing(tmp_path):
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, EXPERTS, (tokens, LAYERS, TOP_K)) for tokens in (50, 90)]
    path = tmp_path / "routing.npz"
    np.savez(path, one_ids=texts[0], one_seq_lens=np.array([50]), two_ids=texts[1])
    return path


def test_recorded_routing_is_counted_layer_by_layer(routing):
    series = read_series(routing, ranks=4, window=20)
    assert (series.layers, series.loads.shape) == (LAYERS, (LAYERS * 6, 4, EXPERTS))
    one, two = workload.read_routing(routing)
    windows = [one[:20], one[20:40], *(two[begin : begin + 20] for begin in range(0, 80, 20))]
    for index, window in enumerate(windows):
        for layer in range(LAYERS):
            for rank in range(4):
                rows = window[5 * rank : 5 * rank + 5, layer]
                counted = np.bincount(rows.ravel(), minlength=EXPERTS)
                assert series.loads[layer * 6 + index, rank].tolist() == counted.tolist()


def test_the_command_plans_recorded_routing(routing):
    result = invoke(routing, "--ranks", 4, "--window", 20, "--policy", "eplb,ultraep")
    assert result.exit_code == 0, result.stderr
    assert "3 layers, 18 microbatches of 40 tokens, 4 ranks, 8 experts" in result.stdout
    assert "eplb on 3 of 18 microbatches had no past" in result.stdout
    lines = json.loads(invoke(routing, "--ranks", 4, "--window", 20, "--json").stdout)
    assert [line["layer"] for line in lines] == [0] * 6 + [1] * 6 + [2] * 6
    assert all(line["total_tokens"] == 40 for line in lines)


def test_the_past_is_that_of_the_layer():
    series = Series(np.arange(6).reshape(6, 1, 1), layers=2)
    found = [series.past(index, 2).ravel().tolist() for index in range(6)]
    assert found == [[0], [0], [0, 1], [3], [3], [3, 4]]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "recorded routing, expert ids of tokens: say how many ranks"),
        (["--ranks", 0], "--ranks must be at least 1, got 0"),
        (["--ranks", 3], "a window of 4096 tokens does not divide over 3 ranks"),
        (["--ranks", 4], "no text has 4096 tokens, the longest has 90"),
        (["--ranks", 4, "--window", 0], "a window of 0 tokens"),
        (["--ranks", 4, "--window", 20, "--experts", 7], "need 8 to 1048576 experts, got 7"),
        (["--ranks", 4, "--window", 20, "--experts", 10**20], "got 100000000000000000000"),
        (["--ranks", 3, "--window", 30], "8 experts do not divide evenly over 3 ranks"),
        (["--ranks", 10, "--window", 10, "--experts", 1 << 20], "at most 33,554,432"),
    ],
)
def test_what_cannot_be_counted_is_one_line(routing, options, told):
    result = invoke(routing, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr


def test_a_trace_is_planned_by_layer(tmp_path):
    plans = [plan_for(seed) for seed in range(6)]
    folder = record(tmp_path / "run", plans, layers=2)
    file = tmp_path / "run.npz"
    read_trace(folder).save(file)
    for path in (folder, file):
        series = read_series(path)
        assert series.layers == 2
        wanted = [plans[index].loads for index in (0, 2, 4, 1, 3, 5)]
        np.testing.assert_array_equal(series.loads, wanted)
        assert invoke(path).exit_code == 0


def test_options_of_routing_are_refused_elsewhere(tmp_path):
    np.save(tmp_path / "loads.npy", np.ones((2, 4), dtype=int))
    for option in ("experts", "window"):
        with pytest.raises(ConfigError, match=f"--{option} is for recorded routing"):
            read_series(tmp_path / "loads.npy", **{option: 8})


def test_the_library_does_not_take_routing_or_traces_for_loads(routing, tmp_path):
    with pytest.raises(FileError, match="recorded routing, not loads: one_ids holds expert ids"):
        workload.read_loads(routing)
    read_trace(record(tmp_path / "run", [plan_for(0)])).save(tmp_path / "run.npz")
    with pytest.raises(FileError, match="a trace, not loads"):
        workload.read_loads(tmp_path / "run.npz")
