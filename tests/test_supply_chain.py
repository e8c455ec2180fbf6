"""Locks have hashes and no addresses; the bill of materials and the audit say what they must."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PIN = re.compile(
    r"^([a-z0-9-]+)==([^ \n]+)(?: ; [^\\\n]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+",
    re.MULTILINE,
)


def pins(path: Path) -> dict[str, str]:
    return {match[1]: match[2] for match in PIN.finditer(path.read_text())}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_only_versions_and_hashes(path):
    text = path.read_text()
    rest = PIN.sub("", text)
    assert rest.count("\n") == 1  # the header
    assert rest.startswith("# ")
    assert "://" not in text
    assert "torch" not in pins(path)
    assert not [name for name in pins(path) if name.startswith(("nvidia-", "cuda-"))]


def test_the_lock_has_what_the_tests_require():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked = pins(ROOT / "requirements" / "dev.txt")
    assert_locked([*project["dependencies"], *extras["dev"]], locked)
    locked |= pins(ROOT / "requirements" / "frameworks.txt")
    assert_locked([*extras["megatron"], *extras["torchtitan"]], locked)
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    for line in constraints[1:]:
        name, _, version = line.partition("==")
        assert locked.get(name, version) == version, line


def assert_locked(requirements: list[str], locked: dict[str, str]) -> None:
    for line in requirements:
        required = Requirement(line)
        name = canonicalize_name(required.name)
        if name != "torch":
            assert required.specifier.contains(locked[name], prereleases=True), line


def test_the_makefile_pins_the_same_versions():
    text = (ROOT / "Makefile").read_text()
    for variable, name, lock in (
        ("ENGINE_VERSION", "transformer-engine", "engine"),
        ("TRITON_VERSION", "triton", "triton"),
    ):
        (version,) = re.findall(rf"^{variable} := (\S+)$", text, re.MULTILINE)
        assert pins(ROOT / "requirements" / f"{lock}.txt") == {name: version}
