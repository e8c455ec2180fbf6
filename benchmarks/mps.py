"""Several processes on one GPU at the same time, each with a share of its multiprocessors.

CUDA MPS lets processes run kernels concurrently. Without it the GPU switches between processes,
and ranks that wait for each other would stall. NCCL refuses two ranks on one device, so these ranks
use gloo and map each other's memory.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from harness import Report
from timing import print_progress

from ultraep.comm import Communicator, Message, Peers

CONTROL = "nvidia-cuda-mps-control"
LIMIT = 60  # seconds for a command of the daemon, or for one process
CLOSING = 10  # seconds until the daemon ends processes that are still connected
TRIES = 3


@contextmanager
def report_of_ranks(
    benchmark: str, argv: Sequence[str], ranks: int, *, cuda: bool
) -> Iterator[Report]:
    """Print the header of a report. With `cuda`, processes started in this block share the GPU."""
    # Another process reads the name of the GPU: this process must not open the GPU.
    query = "nvidia-smi --query-gpu=name --format=csv,noheader"
    device = f"{os.popen(query).read().strip()}, {ranks} processes with CUDA MPS" if cuda else None
    report = Report(benchmark, argv, device=device)
    report.header()
    with shared_card(ranks) if cuda else nullcontext():
        yield report


def device_of_rank(*, cuda: bool) -> torch.device:
    """Return the device of this process: the shared GPU, or the CPU."""
    if not cuda:
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


class ThroughHost:
    """Messages of a GPU through pinned memory of the host: gloo cannot send all GPU tensors."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.rank, self.size, self.timeout = comm.rank, comm.size, comm.timeout

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._comm.all_gather(_on_host(tensor)).to(tensor.device)

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> torch.Tensor:
        arrived = self._comm.all_to_all(_on_host(rows), send_counts, receive_counts)
        return arrived.to(rows.device)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        arrived = _like(receives)
        self._comm.exchange([Message(m.peer, _on_host(m.tensor)) for m in sends], arrived)
        _copy(arrived, receives)

    def gather_objects(self, value: Any) -> list[Any]:
        return self._comm.gather_objects(value)

    def hosts(self) -> Communicator:
        return self._comm.hosts()

    def part(self, size: int) -> Communicator:
        return ThroughHost(self._comm.part(size))

    def peers(self, device: torch.device) -> Peers:
        return self._comm.peers(device)

    def check_alive(self) -> None:
        self._comm.check_alive()

    def close(self) -> None:
        self._comm.close()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host; waits for the current stream."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu":
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staged.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return staged


def _like(messages: Sequence[Message]) -> list[Message]:
    """Return messages on the host into which others can be received."""
    return [
        Message(peer, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
        for peer, tensor in messages
    ]


def _copy(arrived: Sequence[Message], targets: Sequence[Message]) -> None:
    for source, target in zip(arrived, targets, strict=True):
        target.tensor.detach().copy_(source.tensor)


@contextmanager
def phase(what: str, seconds: float, end: float) -> Iterator[None]:
    """Print what this process does. If it takes too long, print all stacks and end the process.

    seconds: the most it may take.   end: of the whole run, by `time.time()`.
    """
    if what:
        print_progress(what)
    limit = max(1.0, min(seconds, end - time.time()))
    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def shared_card(ranks: int) -> Iterator[None]:
    """Let processes started in this block share the GPU; the daemon stops after the block."""
    if shutil.which(CONTROL) is None:
        raise SystemExit(
            f"{ranks} processes on one GPU need CUDA MPS, but {CONTROL} is not installed"
        )
    before = dict(os.environ)
    with daemon() as directories:
        try:
            os.environ |= directories | rank_environment(ranks)
            # The GPU has too few connections for all processes.
            os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def rank_environment(ranks: int) -> dict[str, str]:
    """Return the variables of a process that is one of several ranks of the GPU."""
    return {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks),
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }


@contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """Run the MPS daemon; yield the environment variables with which processes find it."""
    with tempfile.TemporaryDirectory(prefix="ultraep-mps-") as folder:
        directories = {}
        for name in ("PIPE", "LOG"):
            path = directories[f"CUDA_MPS_{name}_DIRECTORY"] = os.path.join(folder, name.lower())
            os.mkdir(path)
        run = partial(
            subprocess.run,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env=os.environ | directories,
        )
        started = run([CONTROL, "-d"])
        if started.returncode:
            raise SystemExit(f"CUDA MPS did not start: {started.stderr or started.stdout}")
        try:
            _start_server(run)
            yield directories
        finally:
            run([CONTROL], input=f"quit -t {CLOSING}\n")


def _start_server(run: Callable[..., Any]) -> None:
    """Start the MPS server before the ranks connect; otherwise it refuses some of them."""
    run([CONTROL], input=f"start_server -uid {os.getuid()}\n")
    first = "import torch; torch.ones(1, device='cuda').item()"
    for _ in range(TRIES):
        ran = run([sys.executable, "-c", first])
        if ran.returncode == 0:
            return
    raise SystemExit(f"no process can use the GPU through CUDA MPS: {ran.stderr[-500:]}")
