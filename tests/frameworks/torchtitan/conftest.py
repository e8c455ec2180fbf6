"""Tests of torchtitan. They use the model and the CUDA stand-ins of the example."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("torchtitan")
