"""Injects one fault into the process of a rank, from outside of the library.

The injector replaces the records of a balancer, to see stages, and wraps what a user hands over:
router, network, policy. The corrupted digest replaces a method of one object in this process.
"""

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from soak.schedule import Fault
from soak.training import Watch

from ultraep import Balancer, Problem, register_policy
from ultraep.arrays import IntArray
from ultraep.passes import PassRecord
from ultraep.policies import get_policy
from ultraep.position import At, Position
from ultraep.runtime.agreement import FIELDS

CLOCK_JUMP = 3600.0  # seconds
OBSERVED = (
    *("kill", "stop", "slow", "hook", "clock", "full disk"),
    *("lost messages", "delayed messages"),
)
POINTS = {
    "loads": (At.LOADS, At.LOADS_RECOMPUTED),
    "plan": (At.PLAN,),
    "combine back": (At.BACKWARD,),
}
DIGEST = FIELDS.index("digest")
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

    delay: of the fault, in seconds.
    fire: reports the fault to the supervisor, and waits until that has done its part.
    """

    def __init__(self, fault: Fault, rank: int, delay: float, fire: Callable[[], None]) -> None:
        self.fault, self.rank, self._delay, self._fire = fault, rank, delay, fire
        self.pending = fault.rank == rank
        self._routed = self._planned = 0
        _of_thread.injector = self

    def attach(self, balancer: Balancer) -> None:
        if self.fault.kind in OBSERVED:
            balancer.log.record_type = partial(_Watched, self)
        if self.fault.kind == "digest":
            agreement = balancer._agreement
            make_record = agreement._record
            agreement._record = lambda place, *rest: self._corrupted(
                place, balancer._count, make_record(place, *rest)
            )

    def _happens(self, kind: str, microbatch: int) -> bool:
        """Whether the fault happens now, and report it; it happens once."""
        if not self.pending or kind != self.fault.kind or microbatch < self.fault.microbatch:
            return False
        self.pending = False
        self._fire()
        return True

    def _raise_if(self, kind: str, microbatch: int) -> None:
        if self._happens(kind, microbatch):
            raise InjectedError(f"the {kind} of rank {self.rank} failed at {self.fault.stage}")

    def begin(self, record: PassRecord) -> None:
        """A stage has begun."""
        kind, count = self.fault.kind, record.passes.count if record.passes else 0
        if record.stage != self.fault.stage or not self._happens(kind, count):
            return
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # the supervisor continues the process
        elif kind == "slow":
            time.sleep(self._delay)
        elif kind == "clock":
            jump, real_time = CLOCK_JUMP * (-1) ** self.fault.number, time.time
            time.time = lambda: real_time() + jump
        elif kind == "full disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        elif kind == "hook":
            raise InjectedError(f"a hook of rank {self.rank} failed at {self.fault.stage}")

    def router(self, ids: torch.Tensor) -> torch.Tensor:
        self._routed += 1
        self._raise_if("router", self._routed)
        if ids.numel() and self._happens("device", self._routed):
            ids = ids.clone()
            ids[0, 0] = 1 << 20  # no such expert: kernels note it
        return ids

    def network(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.fault.stage != "experts back":
            self._raise_if("network", self._routed)
        elif outputs.requires_grad:
            outputs.register_hook(lambda _: self._raise_if("network", self._routed))
        return outputs

    def planning(self) -> None:
        self._planned += 1
        self._raise_if("planner", self._planned)

    def _corrupted(self, place: Position, count: int, record: torch.Tensor) -> torch.Tensor:
        stage = self.fault.stage
        if stage == "plan" and self.fault.plane == "mapped":
            stage = "loads"  # ranks do not compare plans that stay on their devices
        if place.at in POINTS[stage] and self._happens("digest", count):
            record[DIGEST] ^= 1
        return record


class _Watched(PassRecord):
    """A pass whose stages the injector sees."""

    __slots__ = ("_injector",)

    def __init__(self, injector: Injector, *args: Any) -> None:
        super().__init__(*args)
        self._injector = injector

    def at(self, stage: str, in_backward: str = "") -> None:
        super().at(stage, in_backward)
        self._injector.begin(self)
