"""Files are written atomically, also through links; nothing else is changed."""

import os
import stat

import pytest

from ultraep import FileError
from ultraep.files import writing
from ultraep_tools import outputs


@pytest.fixture
def path(tmp_path):
    """A file with the content "before", alone in its folder."""
    (tmp_path / "out.txt").write_text("before")
    (tmp_path / "out.txt").chmod(0o640)
    yield tmp_path / "out.txt"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_a_file_is_replaced_in_one_go(path):
    with writing.whole_file(path) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [ValueError("ours"), KeyboardInterrupt()])
def test_an_error_leaves_the_existing_file(path, error):
    def write_half():
        with writing.whole_file(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        write_half()
    assert path.read_text() == "before"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path, exists):
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target.txt", tmp_path / "link.txt"
    if exists:
        target.write_text("before")
    link.symlink_to(target)
    outputs.check_targets(link, force=True)
    assert link.is_symlink()
    assert target.exists() == exists
    writing.write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link.txt"]


def test_a_full_disk_is_a_file_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FileError, match=r"out.txt: cannot be written: No space left on device"):
        writing.write_text(tmp_path / "out.txt", "x" * 100_000)
    assert os.listdir(tmp_path) == []


def test_devices_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/null"):
        with pytest.raises(FileError, match=f"{path}: cannot be written: not a regular file"):
            writing.write_text(path, "x")
    assert os.listdir(tmp_path) == ["pipe"]


def test_unwritable_targets_are_refused_before_and_after(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for name in ("", "none/out.txt", "loop", "file/out.txt"):
        with pytest.raises(FileError, match="cannot be written"):
            outputs.check_targets(tmp_path / name)
        with pytest.raises(FileError, match="cannot be written"):
            writing.write_text(tmp_path / name, "x")
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]
    assert (tmp_path / "loop").is_symlink()
