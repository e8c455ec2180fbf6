"""Where the tests find the example, whose model and whose stand-ins for CUDA they use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("torchtitan")
