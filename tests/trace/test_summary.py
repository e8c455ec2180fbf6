"""The summary of a piece has one line per record, computed from its arrays."""

import numpy as np
from traces import TOPOLOGY, arrived, plan_for

from ultraep import Recorder, read_trace
from ultraep.trace.files import read_header, read_piece
from ultraep.trace.schema import SUMMARIES, Column

PLANS = [plan_for(seed) for seed in range(4)]


def summary_of_rank(run, rank):
    path = run / f"rank-{rank:05d}/000000.npz"
    return read_piece(path, read_header(run), rank, SUMMARIES)


def test_a_recorder_stores_what_the_overview_needs(tmp_path):
    run = tmp_path / "run"
    for rank in range(2):
        with Recorder(run, TOPOLOGY, rank=rank) as recorder:
            for step, plan in enumerate(PLANS):
                seconds = {"experts": 0.25, "plan": 0.5, "combine": 9.0}
                rows = arrived(plan, rank)
                recorder.add(plan=plan, slot_rows=rows, step=step, bytes_moved=7, seconds=seconds)
                recorder.more(step=step, bytes_moved=3, seconds={"experts back": 1.5})
                recorder.more(step=step, bytes_moved=1, seconds={"reduce": 0.125})
    trace = read_trace(run)
    assert not any(name in trace.arrays for name in SUMMARIES)
    for rank in range(2):
        summary = summary_of_rank(run, rank)
        lines = summary["summary"]
        assert lines[:, Column.STEP].tolist() == [0, 1, 2, 3]
        assert not lines[:, Column.LATE].any()
        assert lines[:, Column.ROWS].tolist() == trace.rank_loads[:, rank].tolist()
        assert set(lines[:, Column.BYTES].tolist()) == {11}
        assert set(lines[:, Column.EXPERTS].tolist()) == {250_000_000}
        assert set(lines[:, Column.EXPERTS_BACK].tolist()) == {1_500_000_000}
        assert set(lines[:, Column.COST].tolist()) == {625_000_000}
        assert summary["more_lines"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        np.testing.assert_allclose(summary["stage_sums"], trace.seconds[:, rank].sum(axis=0))
    lines = summary_of_rank(run, 0)["summary"]
    assert lines[:, Column.ROUTED].tolist() == trace.loads.sum(axis=(1, 2)).tolist()
    assert lines[:, Column.PEAK].tolist() == trace.initial_rank_loads.max(axis=1).tolist()
    assert lines[:, Column.REPLICAS].tolist() == trace.num_copies.tolist()
    assert not summary_of_rank(run, 1)["summary"][:, Column.ROUTED :].any()


def test_invalid_times_are_clipped(tmp_path):
    with Recorder(tmp_path / "run", TOPOLOGY) as recorder:
        for step, value in enumerate((np.nan, np.inf, -1.0, 3e38)):
            rows = arrived(PLANS[0], 0)
            recorder.add(plan=PLANS[0], slot_rows=rows, step=step, seconds={"experts": value})
    lines = summary_of_rank(tmp_path / "run", 0)["summary"]
    assert lines[:, Column.EXPERTS].tolist() == [0, 10**15, 0, 10**15]


def test_additions_to_a_record_of_an_earlier_piece_share_a_line(tmp_path):
    with Recorder(tmp_path / "late", TOPOLOGY) as recorder:
        for step, layer in ((4, 0), (4, 1), (4, 0)):
            recorder.more(step=step, layer=layer, bytes_moved=5)
    late = summary_of_rank(tmp_path / "late", 0)
    assert late["summary"][:, [Column.LATE, Column.BYTES]].tolist() == [[1, 10], [1, 5]]
    assert late["more_lines"].tolist() == [0, 1, 0]
