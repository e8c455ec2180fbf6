"""Agreement: ranks say where they are in the program and what they have, and compare it.

They do so at some points of every step, by gathering a record of 64-bit words from all ranks:

    balancer             which one it is, as a digest
    point, layer, step   where the rank is
    digest               of what must be alike there: signature of tensors, or the plan
    refused, version     whether the rank's input is no good; the version of its weights
    tokens               of this rank, where memory must have room for them
    rows                 the most that it was ever planned to serve, for the same reason
    loads                [E]; zeros where they are not asked for

Records of all points have one size. So ranks at different points still understand each other, and
what all of them see is the same table: all raise the same error, which names them.

Shapes: R ranks, E experts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.comm import Communicator, moved
from ultraep.errors import CommunicationError, PlanMismatch

FIELDS = ("balancer", "point", "layer", "step", "digest", "refused", "version", "tokens", "rows")
ALIKE, PLACE, REFUSED = slice(0, 5), slice(1, 4), 5  # where they stand


class Point(IntEnum):
    """What ranks compare."""

    LOADS = 0
    LOADS_AGAIN = 1
    PLAN = 2
    BACKWARD = 3
    STATE = 4
    PLANE = 5
    RATES = 6


WORDS = {
    Point.LOADS: "the loads",
    Point.LOADS_AGAIN: "the loads, computed again in backward,",
    Point.PLAN: "the plan",
    Point.BACKWARD: "the backward pass",
    Point.STATE: "the full state",
    Point.PLANE: "the choice of a data plane",
    Point.RATES: "the measuring of rates",
}


class Place(NamedTuple):
    """Where a rank is in the program."""

    point: int
    layer: int
    step: int

    def __str__(self) -> str:
        return f"{WORDS[Point(self.point)]} of layer {self.layer} (step {self.step})"


@dataclass(frozen=True, slots=True)
class Records:
    """What all ranks have sent from one place."""

    words: IntArray  # [R, fields and E]
    on_device: torch.Tensor  # the same
    alike: bool  # in all that must be alike

    def column(self, field: str) -> IntArray:
        """[R] one field of all ranks."""
        return self.words[:, FIELDS.index(field)]

    @property
    def loads(self) -> IntArray:
        """[R, E]."""
        return self.words[:, len(FIELDS) :]

    @property
    def loads_on_device(self) -> torch.Tensor:
        """[R, E]."""
        return self.on_device[:, len(FIELDS) :]


class Agreement:
    """What one rank compares with the others. To make one is collective, and compares settings."""

    def __init__(self, comm: Communicator, settings: str, experts: int) -> None:
        self._comm, self._settings, self._experts = comm, settings, experts
        told = comm.gather_objects((settings, secrets.token_hex(8)))
        every = [other for other, _ in told]
        _compare("the settings", every, every)
        # Two balancers with the same settings are two: rank 0 says which one this is.
        self._balancer = short_digest(settings.encode(), told[0][1].encode())

    def loads(
        self,
        place: Place,
        loads_E: torch.Tensor,
        *,
        told: str,
        version: int,
        refused: torch.Tensor | int,
        tokens: int = 0,
        rows: int = 0,
        meanwhile: Callable[[torch.Tensor], None] | None = None,
    ) -> Records:
        """The records of all ranks with their loads. Nothing but the place is compared yet.

        told: the signature of weights and inputs, of which the digest travels.
        meanwhile: what to do with the loads on their device before the host waits for them.
        """
        digest = short_digest(told.encode())
        numbers = (digest, 0, version, tokens, rows)
        record = self._record(place, loads_E.device, numbers)
        record[REFUSED] = refused
        record[len(FIELDS) :] = loads_E
        return self._gather(place, record, meanwhile)

    def compare_inputs(self, records: Records, told: str) -> None:
        """Raise if some rank refused its input, or has inputs or weights of another kind."""
        if records.words[:, REFUSED].any():
            refused = np.flatnonzero(records.column("refused")).tolist()
            raise CommunicationError(f"ranks {refused} refused their input; their errors say why")
        self._compare_digests("the weights or inputs", records, told)

    def meet(self, place: Place, device: torch.device, *, digest: int = 0, told: str = "") -> None:
        """Raise if ranks are at different places, or if the digests differ of what is told."""
        if self._comm.size == 1:
            return
        records = self._gather(place, self._record(place, device, (digest, 0, 0, 0, 0)))
        self._compare_digests(place, records, told)

    def _record(self, place: Place, device: torch.device, numbers: tuple[int, ...]) -> torch.Tensor:
        words = np.zeros(len(FIELDS) + self._experts, np.int64)
        words[: len(FIELDS)] = (self._balancer, *place, *numbers)
        return moved(torch.from_numpy(words), device)

    def _gather(
        self,
        place: Place,
        record: torch.Tensor,
        meanwhile: Callable[[torch.Tensor], None] | None = None,
    ) -> Records:
        try:
            gathered = self._comm.all_gather(record)
        except CommunicationError as error:
            raise CommunicationError(f"at {place}: {error}") from error
        if meanwhile is not None:
            meanwhile(gathered[:, len(FIELDS) :])
        words = gathered.cpu().numpy()
        records = Records(words, gathered, bool((words[1:, ALIKE] == words[:1, ALIKE]).all()))
        if not records.alike:
            self._compare_places(records)
        return records

    def _compare_places(self, records: Records) -> None:
        """All ranks have the same table: if one of them asks the others, all do."""
        balancers = records.column("balancer").tolist()
        if len(set(balancers)) > 1:
            _compare("the balancer", balancers, self._comm.gather_objects(self._settings))
        places = [Place(*row) for row in records.words[:, PLACE].tolist()]
        if len(set(places)) > 1:
            groups = _groups(places).items()
            listed = "; ".join(f"ranks {ranks} are at {place}" for place, ranks in groups)
            raise PlanMismatch(f"ranks are at different places of the program: {listed}")

    def _compare_digests(self, what: str | Place, records: Records, told: str) -> None:
        """After places: what is not alike then is the digest, and one asks as all do."""
        if not records.alike:
            _compare(what, records.column("digest").tolist(), self._comm.gather_objects(told))


def short_digest(*parts: Any) -> int:
    """A 62-bit digest of arrays or bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes())
    return int.from_bytes(digest.digest(), "little") >> 2


def _compare(what: str | Place, values: Sequence[Hashable], told: Sequence[str]) -> None:
    """Raise if the values of all ranks are not alike, with what they tell about them."""
    groups = _groups(values)
    if len(groups) > 1:
        listed = "; ".join(f"ranks {ranks} have {told[ranks[0]]}" for ranks in groups.values())
        raise PlanMismatch(f"ranks disagree about {what}: {listed}")


def _groups(values: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """The ranks that have each value."""
    groups: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups
