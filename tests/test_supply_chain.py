"""Locks have hashes and no addresses; the bill of materials and the audit say what they must."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
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


def test_a_bill_of_materials_lists_every_installed_package(tmp_path):
    path = tmp_path / "bill.json"
    subprocess.run([sys.executable, ROOT / ".ci" / "sbom.py", path], check=True, timeout=300)
    bill = json.loads(path.read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == "ultraep"
    components = {item["name"]: item for item in bill["components"]}
    assert {"numpy", "numba", "torch", "typer"} <= components.keys()
    references = [item["ref"] for item in bill["dependencies"]]
    assert len(set(references)) == len(references) == len(components) + 1
    graph = {item["ref"]: item["dependsOn"] for item in bill["dependencies"]}
    assert components["numpy"]["bom-ref"] in graph[bill["metadata"]["component"]["bom-ref"]]
    assert {ref for refs in graph.values() for ref in refs} <= set(references)


AUDITS = {
    "clean": ({"name": "a", "version": "1", "vulns": []}, 0, "0 with known"),
    "known": (
        {"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]},
        *(1, "a 1: X-1, fixed in 2"),
    ),
    "unreachable": ({"name": "a", "skip_reason": "not found"}, 2, "cannot be reached"),
}


@pytest.mark.parametrize("case", AUDITS)
def test_an_audit_that_looked_up_nothing_is_not_a_clean_one(case, monkeypatch, capsys):
    row, code, words = AUDITS[case]
    done = subprocess.CompletedProcess((), 0, json.dumps({"dependencies": [row]}), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(sys, "argv", ["audit.py", "pip-audit"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / ".ci" / "audit.py"), run_name="__main__")
    assert caught.value.code == code
    assert words in capsys.readouterr().out
