"""Tests of Megatron-Core: `make test-frameworks`. They are no part of the ordinary suite."""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before torch is imported by ranks, too

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2] / "examples"):
    sys.path.insert(0, str(folder))
