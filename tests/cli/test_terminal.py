"""No control characters, no broken words, no overwritten files."""

import os
import re
import sys

import numpy as np
import pytest
from traces import plan_for, record

from ultraep_tools.cli.terminal import Terminal, make_grid

from .commands import assert_one_line, invoke, start

posix = pytest.mark.skipif(sys.platform != "linux", reason="needs pipes and file names of Linux")


@pytest.fixture
def loads(tmp_path):
    np.save(tmp_path / "loads.npy", np.arange(64).reshape(2, 4, 8))
    return tmp_path / "loads.npy"


@pytest.fixture
def run(tmp_path):
    return record(tmp_path / "run", [plan_for(seed) for seed in range(4)], layers=2)


HOSTILE = "a\x1b]0;title\x1b[2J\u202eb"
ESCAPED = r"a\x1b]0;title\x1b[2J\u202eb"


@posix
def test_names_of_files_cannot_control_the_terminal(tmp_path, loads, run):
    folder = tmp_path / HOSTILE
    folder.mkdir()
    np.save(folder / "loads.npy", np.load(loads))
    run.rename(folder / "run")
    codes = {
        ("plan", folder / "none.npy"): 2,
        ("trace", "info", folder / "none"): 2,
        ("plan", f"--{HOSTILE}"): 2,
        ("plan", folder / "loads.npy"): 0,
        ("trace", "info", folder / "run"): 0,
        ("trace", "export", folder / "run", "--npz", folder / "a.npz"): 0,
    }
    for arguments, code in codes.items():
        result = invoke(*arguments, width=1000)
        assert result.exit_code == code, result.stderr
        assert ESCAPED in result.stdout + result.stderr
        assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", result.stdout + result.stderr)


def test_a_narrow_table_is_a_paragraph_for_every_row(capsys):
    headers, rows = ["policy", "imbalance\nmean", "copies"], [["ultraep", "1.001", "12"]]
    grid = make_grid(headers, rows, "Heading")
    Terminal(width=22).print(grid)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        *("Heading", "ultraep", "  imbalance mean 1.001", "  copies         12")
    ]
    Terminal(width=80).print(grid)
    assert "policy" in capsys.readouterr().out


@posix
def test_a_closed_pipe_exits_silently(run):
    read, write = os.pipe()
    os.close(read)
    process = start("trace", "info", run, stdout=write)
    os.close(write)
    assert process.communicate(timeout=300)[1] == ""
    assert process.returncode == 141


@pytest.mark.parametrize("option", ["--npz", "--export"])
def test_existing_files_are_overwritten_by_force_only(run, tmp_path, option):
    out = tmp_path / "out.npz"
    out.write_bytes(b"mine")
    command = ("view", run) if option == "--export" else ("trace", "export", run)
    result = invoke(*command, option, out)
    assert_one_line(result, "out.npz: exists; choose another name, or overwrite it with --force")
    assert out.read_bytes() == b"mine"
    assert invoke(*command, option, out, "--force").exit_code == 0
    assert out.read_bytes() != b"mine"
