"""Several processes on one card at the same time, each with a share of its multiprocessors.

CUDA MPS lets processes run kernels side by side. Without it, the card switches between processes,
and ranks that wait for each other would not get on. NCCL refuses two ranks on one device, so these
ranks are joined by gloo and map each other's memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
LIMIT = 60  # seconds that the daemon, or one process, may take
TRIES = 3


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
        try:
            _start_server()
            os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(100 // ranks)
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # the card has too few for all
            yield
        finally:
            _tell("quit")
            os.environ.clear()
            os.environ.update(before)


def _start_server() -> None:
    """Start the server for the ranks: if all of them connect to start it, some are refused."""
    _tell(f"start_server -uid {os.getuid()}")
    first = "import torch; torch.ones(1, device='cuda').item()"
    for _ in range(TRIES):
        ran = subprocess.run([sys.executable, "-c", first], capture_output=True, timeout=LIMIT)
        if ran.returncode == 0:
            return
    raise SystemExit(f"no process can use the card through CUDA MPS: {ran.stderr.decode()[-500:]}")


def _tell(command: str) -> None:
    """Send the daemon a command."""
    subprocess.run(
        [CONTROL], input=f"{command}\n", text=True, capture_output=True, timeout=LIMIT, check=False
    )
