"""Integrations without their library: one error, which says how to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ultraep import BackendUnavailable


@pytest.mark.parametrize("name", ["torchtitan", "transformers"])
def test_no_library_at_all(name):
    code = f"""
import importlib.metadata as metadata
def missing(name): raise metadata.PackageNotFoundError(name)
metadata.version = missing
import ultraep.integrations.{name}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "BackendUnavailable" in done.stderr
    assert f"pip install 'ultraep[{name}]'" in done.stderr
    assert issubclass(BackendUnavailable, ImportError)
