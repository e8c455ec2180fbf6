"""Settings for all tests: the same examples every time, no test limited by a slow machine.

Without a GPU, the kernels for it run through Triton's interpreter.
"""

import os
import sys
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is first imported

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
