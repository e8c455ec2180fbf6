"""Several processes on one card at the same time, each with a share of its multiprocessors.

CUDA MPS lets processes run kernels side by side. Without it, the card switches between processes,
and ranks that wait for each other would not get on. NCCL refuses two ranks on one device, so these
ranks are joined by gloo and map each other's memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
LIMIT = 60  # seconds that the daemon may take to start or to end


@contextmanager
def shared_card(ranks: int) -> Iterator[None]:
    """Let the processes that start in this block share the card; the daemon ends with the block."""
    if shutil.which(CONTROL) is None:
        raise SystemExit(f"eight ranks on one card need CUDA MPS, but {CONTROL} is not installed")
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="ultraep-mps-") as folder:
        for name in ("PIPE", "LOG"):
            path = os.environ[f"CUDA_MPS_{name}_DIRECTORY"] = os.path.join(folder, name.lower())
            os.mkdir(path)
        started = subprocess.run([CONTROL, "-d"], capture_output=True, text=True, timeout=LIMIT)
        if started.returncode:
            raise SystemExit(f"CUDA MPS does not start here: {started.stderr or started.stdout}")
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // ranks)
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        try:
            yield
        finally:
            quits = {"input": "quit\n", "text": True, "capture_output": True, "timeout": LIMIT}
            subprocess.run([CONTROL], check=False, **quits)  # type: ignore[call-overload]
            os.environ.clear()
            os.environ.update(before)
