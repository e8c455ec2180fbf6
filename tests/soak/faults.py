"""Injects one fault into the process of a rank, from outside of the library.

The injector replaces the records of a balancer, to see stages, and wraps what a user hands over:
router, network, policy. The corrupted digest replaces a method of one object in this process.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from soak.schedule import DISKS, Fault
from soak.training import Training, Watch, WrongNumber
from torch.distributed.checkpoint.api import CheckpointException

from ultraep import Balancer, Problem, register_policy
from ultraep.arrays import IntArray
from ultraep.parallel.checkpoint import ShardedState
from ultraep.passes import PassRecord
from ultraep.policies import get_policy
from ultraep.position import At, Position

checkpoints: Any = dcp  # mypy does not see its functions there
CLOCK_JUMP = 3600.0  # seconds
OBSERVED = ("kill", "stop", "slow", "hook", "clock", "lost messages", "delayed messages")
POINTS = {
    "loads": (At.LOADS, At.LOADS_RECOMPUTED),
    "plan": (At.PLAN,),
    "combine back": (At.BACKWARD,),
}
DIGEST = 4  # position in a record of `Agreement`
PLANNER = "soak"  # a policy that fails on demand
_of_thread = threading.local()  # the injector of the rank that runs in a thread


class InjectedError(RuntimeError):
    """An error of the user's code."""


@register_policy(PLANNER)
def plan_or_fail(problem: Problem) -> IntArray:
    """Replicate as ultraep does, unless the injector raises."""
    _of_thread.injector.planning()
    return get_policy("ultraep").decide(problem)


class Injector(Watch):
    """Waits for the moment of a fault and injects it.

    fire: reports the fault to the supervisor, and waits until that has done its part.
    disk: the directory that a disk fault hits.
    """

    def __init__(self, fault: Fault, rank: int, fire: Callable[[], None], disk: Path) -> None:
        self.fault, self.rank, self._fire, self.disk = fault, rank, fire, disk
        self.pending = fault.rank == rank or fault.kind in DISKS
        self._routed = self._planned = 0
        self._saved: dict[str, torch.Tensor] = {}
        _of_thread.injector = self

    def attach(self, balancer: Balancer) -> None:
        """Watch the stages of a balancer."""
        if self.fault.kind in OBSERVED:
            balancer.log.record_type = partial(_Watched, self)  # type: ignore[assignment]
        if self.fault.kind == "digest":
            agreement: Any = balancer._agreement
            make_record = agreement._record
            agreement._record = lambda place, *rest: self._corrupted(
                place, make_record(place, *rest)
            )

    def _happens(self, kind: str, microbatch: int) -> bool:
        """Whether the fault happens now; it happens once."""
        if not self.pending or kind != self.fault.kind or microbatch < self.fault.microbatch:
            return False
        self.pending = False
        return True

    # -- stages ----------------------------------------------------------------------------------

    def begin(self, record: PassRecord) -> None:
        """A stage has begun."""
        kind = self.fault.kind
        if record.stage == self.fault.stage and self._happens(kind, record.step):
            self._act(kind)

    def _act(self, kind: str) -> None:
        self._fire()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # the supervisor continues the process
        elif kind == "slow":
            time.sleep(self.fault.delay)
        elif kind == "clock":
            jump, real_time = CLOCK_JUMP * (-1) ** self.fault.number, time.time
            time.time = lambda: real_time() + jump
        elif kind == "hook":
            raise InjectedError(f"a hook of rank {self.rank} failed at {self.fault.stage}")

    # -- the user's code -------------------------------------------------------------------------

    def router(self, ids: torch.Tensor) -> torch.Tensor:
        self._routed += 1
        if self._happens("router", self._routed):
            self._fire()
            raise InjectedError(f"the router of rank {self.rank} failed")
        if ids.numel() and self._happens("device", self._routed):
            self._fire()
            ids = ids.clone()
            ids[0, 0] = 1 << 20  # no such expert: kernels note it
        return ids

    def network(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.fault.stage == "experts back":
            if outputs.requires_grad and self.pending:
                outputs.register_hook(self._in_backward)
        elif self._happens("network", self._routed):
            self._fail_network()
        return outputs

    def _in_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._happens("network", self._routed):
            self._fail_network()
        return gradient

    def _fail_network(self) -> None:
        self._fire()
        raise InjectedError(f"the network of rank {self.rank} failed at {self.fault.stage}")

    def planning(self) -> None:
        """Raise if the policy is to fail now."""
        self._planned += 1
        if self._happens("planner", self._planned):
            self._fire()
            raise InjectedError(f"the policy of rank {self.rank} failed")

    def _corrupted(self, place: Position, record: torch.Tensor) -> torch.Tensor:
        stage = self.fault.stage
        if stage == "plan" and self.fault.plane == "mapped":
            stage = "loads"  # ranks do not compare plans that stay on their devices
        if place.at in POINTS[stage] and self._happens("digest", place.step):
            self._fire()
            record[DIGEST] ^= 1
        return record

    # -- disks -----------------------------------------------------------------------------------

    def after_step(self, step: int, training: Training) -> None:
        """Break the disk, and save a checkpoint on it. All ranks call it."""
        done = (step + 1) * len(training.layers)
        if self.fault.kind not in DISKS or not self.pending:
            return
        saves = self.fault.stage == "checkpoint"
        if saves and not self._saved:
            self._saved = _values(training)
            checkpoints.save(_state(training), checkpoint_id=self.disk / "good")
        if not self._happens(self.fault.kind, done):
            return
        training.balancer.comm.gather_objects(None)  # all ranks have saved
        if self.rank == self.fault.rank:
            self._fire()
            break_disk(self.disk, full=self.fault.kind == "full disk")
        training.balancer.comm.gather_objects(None)
        if saves:
            self._check_checkpoints(training)

    def _check_checkpoints(self, training: Training) -> None:
        """Save to the broken disk, which must fail; the earlier checkpoint must stay as it is."""
        saved = True
        try:
            checkpoints.save(_state(training), checkpoint_id=self.disk / "bad")
        except (CheckpointException, OSError):
            saved = False
        everywhere = training.balancer.comm.gather_objects(saved)
        if any(everywhere):
            raise WrongNumber(f"a full disk took checkpoints of ranks {everywhere}")
        current = {name: tensor.clone() for name, tensor in training.layers.state_dict().items()}
        checkpoints.load(_state(training), checkpoint_id=self.disk / "good")
        for name, tensor in _values(training).items():
            # Routers differ between the ranks of this run; a checkpoint holds the router of one.
            if "router" not in name and not torch.equal(tensor, self._saved[name]):
                raise WrongNumber(f"rank {self.rank}: {name} of the earlier checkpoint has changed")
        training.layers.load_state_dict(current)


class _Watched(PassRecord):
    """A pass whose stages the injector sees."""

    __slots__ = ("_injector",)

    def __init__(self, injector: Injector, *args: Any) -> None:
        super().__init__(*args)
        self._injector = injector

    def at(self, stage: str, in_backward: str = "") -> None:
        super().at(stage, in_backward)
        self._injector.begin(self)


def _state(training: Training) -> dict[str, Any]:
    return {"training": ShardedState(training.layers)}


def _values(training: Training) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in training.layers.named_parameters()}


def break_disk(disk: Path, *, full: bool) -> None:
    """Fill a disk or make it read-only. Without root, this process alone cannot write any more."""
    if not os.path.ismount(disk):
        if full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        else:
            disk.chmod(0o555)
        return
    if not full:
        remount = ["mount", "-o", "remount,ro", str(disk)]
        for _ in range(100):  # busy while a rank writes
            if subprocess.run(remount, capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.05)
        raise OSError(errno.EBUSY, "cannot be made read-only", str(disk))
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while filler.write(b"0" * 4096):
            pass
