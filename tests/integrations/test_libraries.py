"""Unsupported versions of libraries are refused with the command that installs a supported one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from ultraep import BackendUnavailable
from ultraep.supported import MEGATRON, TORCHTITAN, TRANSFORMERS, VLLM, Library

VERSIONS = [  # refused, accepted
    (MEGATRON, ["0.15.3", "0.20.0rc1", "1.16.0"], ["0.16.1", "0.16.1rc2+local", "0.19.2"]),
    (TORCHTITAN, ["0.2.2", "0.4.0", "1.0.0.dev1"], ["0.3.0", "0.3.1"]),
    (TRANSFORMERS, ["4.57.1", "5.3.0", "6.0.0.dev0"], ["5.17.0", "5.22.1"]),
    (VLLM, ["0.31.2", "0.33.0rc1", "1.0"], ["0.32.0", "0.32.1", "0.32.0+cpu"]),
]


@pytest.mark.parametrize(("known", "refused", "accepted"), VERSIONS, ids=lambda value: str(value))
def test_versions(known, refused, accepted, monkeypatch):
    for version in accepted:
        monkeypatch.setattr(Library, "installed", lambda _, version=version: version)
        known.check()
    for version in refused:
        monkeypatch.setattr(Library, "installed", lambda _, version=version: version)
        with pytest.raises(BackendUnavailable) as error:
            known.check()
        message = f"{known.name} {known.supported()} is needed, but {version} is installed"
        assert message in str(error.value)


@pytest.mark.parametrize("known", [MEGATRON, VLLM])
def test_a_missing_library(known, monkeypatch):
    monkeypatch.setattr(Library, "installed", lambda _: None)
    with pytest.raises(
        BackendUnavailable, match=rf"no version of it is installed: {re.escape(known.remedy)}"
    ):
        known.check()


def test_importing_an_integration_without_its_library():
    """Megatron-Core is imported only when a layer of it is balanced."""
    code = """
import importlib, importlib.metadata as metadata, sys
def missing(name): raise metadata.PackageNotFoundError(name)
metadata.version = missing
import ultraep.integrations.megatron
assert 'megatron.core' not in sys.modules
for name in ("torchtitan", "transformers"):
    try:
        importlib.import_module(f"ultraep.integrations.{name}")
    except ImportError as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, line in zip(("torchtitan", "transformers"), done.stdout.splitlines(), strict=True):
        assert line.startswith("BackendUnavailable ")
        assert f"pip install 'ultraep[{name}]'" in line
