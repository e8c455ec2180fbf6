"""Parts of pretrain.py that any training has: text, checkpoint files, scalars, signals.

Shapes: B windows, T bytes of a window.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from pickle import UnpicklingError
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pretrain_settings import Settings

from ultraep.errors import CommunicationError, ConfigError, FileError
from ultraep.files.writing import is_unfinished, whole_file, write_text
from ultraep_tools.demo.text import library_text

SETTLE = 0.2  # seconds until all connections have noticed a dead rank


class Windows:
    """Text in windows, some held out. An epoch reads the others once, in its own order."""

    def __init__(self, data: bytes, settings: Settings) -> None:
        self.length, self.seed = settings.training.length, settings.training.seed
        numbers = np.arange((len(data) - 1) // self.length)
        held_out = numbers % settings.data.held_out == 0
        self.held_out = numbers[held_out][: settings.evaluation.windows]
        self.trained = numbers[~held_out]
        if not len(self.trained):
            raise FileError(
                f"{len(data)} bytes of text: too few for two windows of {self.length} bytes"
            )
        self.data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.digest = hashlib.blake2b(data, digest_size=8).hexdigest()
        self._epoch, self._order = -1, self.trained

    def __getitem__(self, numbers: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return `[B, T + 1]` token ids of these windows."""
        begins = torch.from_numpy(numbers * self.length)
        return self.data[begins[:, None] + torch.arange(self.length + 1)].long()

    def after(self, drawn: int, count: int) -> np.ndarray[Any, Any]:
        """Return the numbers of the next `count` windows after the first `drawn`."""
        return np.array([self._at(place) for place in range(drawn, drawn + count)])

    def _at(self, place: int) -> int:
        epoch, place = divmod(place, len(self.trained))
        if epoch != self._epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self._epoch, self._order = epoch, rng.permutation(self.trained)
        return int(self._order[place])


def read_text(files: list[str], pattern: str) -> bytes:
    """Read files, and matching files in folders; without any, Python's standard library."""
    if not files:
        return b"\n".join(library_text().values())
    paths: list[Path] = []
    for name in map(Path, files):
        inside = sorted(path for path in name.rglob(pattern) if path.is_file())
        if name.is_dir() and not inside:
            raise FileError(f"data.files: no {pattern} in {name}")
        paths += inside if name.is_dir() else [name]
    try:
        return b"\n".join(path.read_bytes() for path in paths)
    except OSError as error:
        raise FileError(f"data.files: {error.filename}: {error.strerror}") from None


def write_whole(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def check_store() -> None:
    """Refuse a store that outlives the ranks: restarted ranks would read old addresses there."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            "--elastic: torchrun shares its store with the ranks, so restarted ranks cannot "
            "connect; use torchrun --standalone, and set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )


def remove_unfinished(folder: Path) -> None:
    """Remove what a rank was writing when it was killed; no other run may use the folder."""
    for path in folder.glob(".*"):
        if is_unfinished(path.name):
            path.unlink()


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    return sorted(folder.glob(f"step-{8 * '[0-9]'}.pt"))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint; tensors are read on first use."""
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except (RuntimeError, UnpicklingError) as error:
        raise FileError(f"{path}: {str(error).partition(chr(10))[0]}") from None
    entries = {"config", "step", "text", "rng", "state"}
    if not isinstance(saved, dict) or not saved.keys() >= entries:
        raise FileError(f"{path} is not a checkpoint of pretrain.py")
    return saved


def checkpoint_of(resume: str | None, folder: Path) -> dict[str, Any] | None:
    """Return the checkpoint to resume. The folder must not hold newer ones of another run."""
    existing = checkpoints(folder)
    path = Path(resume) if resume else existing[-1] if existing else None
    if resume == "" and path is None:
        raise FileError(f"no checkpoint in {folder}: start without --resume")
    saved = read_checkpoint(path) if resume is not None and path is not None else None
    start, newest = saved["step"] if saved else 0, int(existing[-1].stem[5:]) if existing else 0
    if newest > start:
        raise ConfigError(
            f"{folder} holds step {newest}, this run starts at {start}: "
            "use --resume, or another checkpoints.folder"
        )
    return saved


def trace_folder(parent: str, start: int, group: int) -> Path | None:
    """Return a new trace folder for this run and group. Collective."""
    if not parent:
        return None
    used = [len(list(Path(parent).glob("*")))]
    dist.broadcast_object_list(used, device=torch.device("cpu"))
    return Path(parent) / f"{used[0]:04d}-from-step-{start}-group-{group}"


def own_gpu(rank: int) -> torch.device:
    """Select the GPU of this rank."""
    number = int(os.environ.get("LOCAL_RANK", rank))
    if number >= torch.cuda.device_count():
        raise ConfigError(f"rank {rank} needs GPU {number}, there are {torch.cuda.device_count()}")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    cuda = {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state()} | cuda


def set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def process_group(backend: str) -> Iterator[None]:
    """Connect the ranks started by torchrun, or this process alone."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def connected() -> Iterator[None]:
    """Turn lost connections of torch.distributed into `CommunicationError`."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(str(error).partition("\n")[0]) from error


@contextmanager
def naming(group: dist.ProcessGroup) -> Iterator[None]:
    """Add the dead ranks to a `CommunicationError`."""
    try:
        yield
    except CommunicationError as error:
        gone = ", ".join(map(str, missing(group)))
        if not gone:
            raise
        raise CommunicationError(f"gone: rank {gone}; {error}") from error


def missing(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks that a message cannot be sent to."""
    time.sleep(SETTLE)
    gone = []
    for peer in range(group.size()):
        try:
            if peer != group.rank():
                dist.isend(torch.zeros(1), peer, group=group)
        except RuntimeError:
            gone.append(peer)
    return gone


class Stop:
    """Catches SIGINT and SIGTERM; all ranks stop together after the step."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Stop:
        signals = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._request) for number in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _request(self, number: int, _: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, self._before[number])  # a second signal stops at once


class Scalars:
    """Writes scalars to the terminal, scalars.jsonl and TensorBoard; rank 0 only."""

    def __init__(self, settings: Settings, start: int, stack: ExitStack) -> None:
        self.silent = dist.get_rank() != 0
        if self.silent:
            return
        folder = Path(settings.logging.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "scalars.jsonl"
        lines = path.read_text().splitlines(keepends=True) if start and path.exists() else []
        whole = (line for line in lines if line.endswith("\n"))
        write_text(path, "".join(line for line in whole if json.loads(line)["step"] <= start))
        self.file = stack.enter_context(path.open("a"))
        self.curves = curves(folder, start, stack) if settings.logging.tensorboard else None

    def add(self, step: int, values: dict[str, float]) -> None:
        """Write the scalars of a step."""
        if self.silent:
            return
        self.file.write(json.dumps({"step": step} | values) + "\n")
        self.file.flush()
        if self.curves is not None:
            for name, value in values.items():
                self.curves.add_scalar(name, value, step)
        words = (f"{name.replace('_', ' ')} {short(value)}" for name, value in values.items())
        self.say("   ".join([f"step {step:>6}", *words]))

    def say(self, words: str) -> None:
        if not self.silent:
            print(words, flush=True)


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def curves(folder: Path, start: int, stack: ExitStack) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("no curves: pip install tensorboard, or pass --no-tensorboard", flush=True)
        return None
    return stack.enter_context(closing(SummaryWriter(folder, purge_step=start + 1)))
