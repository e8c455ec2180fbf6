"""Outputs: whole or not at all, through links, into streams; nothing else is touched."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ultraep import FileError
from ultraep.files import writing
from ultraep.files.reading import read_arrays
from ultraep.trace.files import write_arrays

ROOT = Path(__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the devices of Linux")


def test_a_file_is_replaced_in_one_go(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("before")
    path.chmod(0o640)
    with writing.whole_file(path) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["out.txt"]


def write_half(path, error):
    with writing.whole_file(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt()])
def test_an_error_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "out.txt"
    path.write_text("before")
    with pytest.raises(type(error)):
        write_half(path, error)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, exists):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.txt", tmp_path / "link.txt"
    if exists:
        target.write_text("before")
    link.symlink_to(target)
    writing.check_targets((link, "table"), force=True)
    assert link.is_symlink()
    assert target.exists() == exists
    writing.write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link.txt"]


@linux
def test_devices_are_written_to_and_stay(tmp_path):
    before = os.stat("/dev/null").st_rdev
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    for path in ("/dev/null", link):
        writing.check_targets((path, "table"))
        writing.write_text(path, "gone")
        assert stat.S_ISCHR(os.stat(path).st_mode)
    assert os.stat("/dev/null").st_rdev == before
    assert link.is_symlink()


@linux
def test_a_full_device_is_an_error_of_ours():
    with pytest.raises(FileError, match="/dev/full: cannot be written: No space left on device"):
        writing.write_text("/dev/full", "x" * 100_000)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match=r"out\.txt: cannot be written: No space left"):
        writing.write_text(tmp_path / "out.txt", "half")
    assert os.listdir(tmp_path) == []


def test_a_pipe_gets_a_whole_archive(tmp_path):
    pipe, arrays = tmp_path / "pipe", {"a": np.arange(100_000), "b": np.ones((3, 4))}
    os.mkfifo(pipe)
    copied = []
    reader = threading.Thread(target=lambda: copied.append(pipe.read_bytes()))
    reader.start()
    write_arrays(pipe, arrays)
    reader.join()
    (tmp_path / "copy.npz").write_bytes(copied[0])
    read = read_arrays(tmp_path / "copy.npz")
    assert all((read[name] == array).all() for name, array in arrays.items())
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@linux
def test_standard_output_keeps_what_a_shell_appended_to(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    code = (
        "from ultraep.files.writing import *; print('said'); "
        "write_text('/dev/stdout', 'written\\n')"
    )
    with log.open("ab") as file:
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            stdout=file,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        )
    assert log.read_text() == "before\nsaid\nwritten\n"


def test_what_cannot_be_written_is_refused_before_and_after(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name in ("", "none/out.txt", "loop", "file/out.txt"):
        with pytest.raises(FileError, match="cannot be written"):
            writing.check_targets((tmp_path / name, "table"))
        with pytest.raises(FileError, match="cannot be written"):
            writing.write_text(tmp_path / name, "x")
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]
    assert (tmp_path / "loop").is_symlink()


def test_one_file_under_two_names_is_refused(tmp_path):
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(FileError, match="are the same file"):
        writing.check_targets(
            (tmp_path / "file", "table"), (None, "page"), (tmp_path / "link", "page")
        )
    writing.check_targets((tmp_path / "file", "table"), (tmp_path / "other", "page"))
    assert os.listdir(tmp_path) == ["link"]
