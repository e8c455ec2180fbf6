"""Jobs and messages between supervisor and ranks of a soak test. Does not import torch."""

import os
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from simulated_hosts import SimulatedHost
from soak.schedule import Fault

FLIGHT = "flight"  # directory of the flight recorder, in the directory of a run
TIMEOUT = {"cpu": 8.0, "cuda": 15.0}  # of the balancers, in seconds, by device
SPARE = 60.0  # seconds beyond all timeouts of a run, after which it has hung


@dataclass(frozen=True)
class Job:
    """The work of one rank.

    fault: None: run without faults until the supervisor says stop, and report resources.
    planes: of runs without faults, in turns.   folder: of the run.
    host: on which the rank runs; None: this machine.
    """

    fault: Fault | None
    seed: int
    rank: int
    size: int
    folder: Path
    device: str
    host: SimulatedHost | None = None
    planes: tuple[str, ...] = ()

    @property
    def timeout(self) -> float:
        """Timeout of the balancer, in seconds."""
        return TIMEOUT[self.device] * (1 if self.fault else 10)


def time_limit(device: str) -> float:
    """Return the seconds after which a run has hung: several timeouts may follow each other."""
    return 6 * TIMEOUT[device] + SPARE


class Fired(NamedTuple):
    """The fault happens now."""

    rank: int


class Sample(NamedTuple):
    """The resources of a rank after one training without faults."""

    rank: int
    resources: dict[str, float]


def run_job(job: Job, pipe: Connection) -> None:
    import_module("soak.rank").run_rank(job, pipe)


def shared_files(pids: list[int]) -> list[str]:
    """Return the files in shared memory that these processes made."""
    marks = [f"-{pid}-" for pid in pids]
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [name for name in names if any(mark in name for mark in marks)]
