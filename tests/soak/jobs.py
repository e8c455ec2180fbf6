"""Jobs and messages between supervisor and ranks of a soak test. Does not import torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from simulated_hosts import SimulatedHost
from soak.schedule import Fault

MODULE = "soak.rank"  # imports torch; the server imports it once
FLIGHT = "flight"  # directory of the flight recorder, in the directory of a run
SERVER, PRELOAD = "ULTRAEP_SOAK_SERVER", "ULTRAEP_SOAK_PRELOAD"  # environment variables


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    fault: None: run without faults until the supervisor says stop, and report resources.
    planes: of runs without faults, in turns.
    folder: of the run.   disk: that a fault breaks.   host: where the rank runs; None: here.
    timeout: of the balancer, in seconds.   limit: seconds after which a run has hung.
    """

    fault: Fault | None
    seed: int
    rank: int
    size: int
    folder: Path
    disk: Path
    timeout: float
    limit: float
    device: str
    host: SimulatedHost | None = None
    planes: tuple[str, ...] = ()


class Fired(NamedTuple):
    """The fault happens now."""

    rank: int


class Sample(NamedTuple):
    """The resources of a rank after one run without faults."""

    rank: int
    seconds: float
    resources: dict[str, float]


def run_job(job: Job, pipe: Connection) -> None:
    """Run a job in the process of a rank."""
    import_module(MODULE).run_rank(job, pipe)


def shared_files(pids: list[int]) -> list[str]:
    """Return the files in shared memory that these processes made."""
    marks = [f"-{pid}-" for pid in pids]
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [name for name in names if any(mark in name for mark in marks)]
