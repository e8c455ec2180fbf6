"""Tests of Megatron-Core."""

import os
import sys
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # before ranks import torch

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2] / "examples", HERE.parents[1] / "dispatchers"):
    sys.path.insert(0, str(folder))
