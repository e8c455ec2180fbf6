"""Times of ranks that add to a record several times: what the overview says is what they sum to."""

import numpy as np
import pytest
from traces import arrived

from ultraep import Recorder
from ultraep.tools.view.folder import FolderIndex
from ultraep.tools.view.single import table_of_trace
from ultraep.tools.view.store import Store
from ultraep.trace.files import write_arrays
from ultraep.trace.read import read_trace
from ultraep.trace.schema import fields_in_pieces
from ultraep.trace.summary import summary_of
from view.runs import CONFIG, TOPOLOGY, key_of, plans_of_run

TIMED = ("lost", "saved", "cost", "stages")


def write_parts(folder):
    """A run whose ranks tell of backward in three parts, of the same stages."""
    for rank in range(TOPOLOGY.ranks):
        rng = np.random.default_rng(rank)
        with Recorder(folder, TOPOLOGY, CONFIG, rank=rank) as recorder:
            for place, plan in plans_of_run().items():
                key, rows = key_of(*place), arrived(plan, rank)
                seconds = {"experts": rng.random(), "plan": rng.random()}
                assert recorder.add(plan=plan, slot_rows=rows, seconds=seconds, **key)
                for _ in range(3):
                    seconds = {"experts back": rng.random(), "reduce": rng.random()}
                    assert recorder.more(seconds=seconds, **key)
    return folder


def check(index, trace):
    wanted, found = table_of_trace(trace), index.table
    assert len(found) == len(wanted)
    for name in TIMED:
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-5)
    assert (found.lost >= 0).all()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("parts") / "run")


@pytest.mark.parametrize("live", [False, True])
def test_parts_of_a_stage_are_added_up_before_ranks_are_compared(parts, live):
    index = FolderIndex(parts, Store(), live=live)
    index.read(lambda: False)
    check(index, read_trace(parts))


def test_parts_that_come_while_a_run_is_followed(parts, tmp_path):
    """Each part of backward in a piece of its own, read one after the other."""
    header = read_trace(parts).header
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "header.json").write_text((parts / "header.json").read_text())
    rows = [slice(place, None, 3) for place in range(3)]
    index = FolderIndex(folder, Store(), live=True)
    for number, late in enumerate(rows):
        for rank in range(header.ranks):
            own, fields = folder / f"rank-{rank:05d}", fields_in_pieces(rank)
            own.mkdir(exist_ok=True)
            with np.load(parts / own.name / "000000.npz") as whole:
                piece = {name: whole[name] for name in whole.files if name in fields}
            for name, array in piece.items():
                if fields[name].shape[0] == "M":
                    piece[name] = array[late]
                elif number and fields[name].shape[0] in "NC":
                    piece[name] = array[:0]
            write_arrays(own / f"{number:06d}.npz", piece | summary_of(header, piece))
        index.read(lambda: False)
    check(index, read_trace(parts))
