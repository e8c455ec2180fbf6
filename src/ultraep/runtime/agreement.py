"""Agreement: ranks compare where they are in the program and what they have.

At some points of every step, ranks gather a record of 64-bit words from all ranks:

    balancer             digest that identifies the balancer
    point, ..., microbatch    position of the rank in the program
    digest               of what must be equal there: signature of tensors, or the plan
    refused              whether the rank refuses its input
    tokens               of this rank, for the size of memory
    loads                [E]; at points that gather no loads, zeros, or one number and zeros
    crossing             [D] tokens of this rank that each fast-link domain serves, if several

Records have the same size at every point. So ranks at different points can still compare them, and
all ranks raise the same error, which names the ranks that differ.

Shapes: R ranks, E experts, D fast-link domains if there are several, otherwise 0.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.comm import Communicator, moved
from ultraep.errors import CommunicationError
from ultraep.position import At, Position, compare_positions, compare_values
from ultraep.runtime.flight import Flight, flight_of
from ultraep.trace.flight import MEETINGS

FIELDS = ("balancer", "point", "layer", "step", "microbatch", "digest", "refused", "tokens")
COMPARED, PLACE, REFUSED = slice(0, 6), slice(1, 5), 6  # positions in a record


MEETING_OF: dict[int, str] = dict(  # in the flight recorder; the other points are inside of stages
    zip((At.STATE, At.PLANE, At.RATES, At.SPEEDS), MEETINGS, strict=True)
)


@dataclass(frozen=True, slots=True)
class Records:
    """The records of all ranks from one place."""

    words: IntArray  # [R, fields, E and D]
    on_device: torch.Tensor  # the same
    equal: bool  # whether all ranks agree about what must be equal
    place_of_loads: slice  # in a record

    def column(self, field: str) -> IntArray:
        """Return [R] one field of all ranks."""
        return self.words[:, FIELDS.index(field)]

    @property
    def loads(self) -> IntArray:
        """[R, E]."""
        return self.words[:, self.place_of_loads]

    @property
    def crossing(self) -> IntArray:
        """[R, D]."""
        return self.words[:, self.place_of_loads.stop :]

    @property
    def loads_on_device(self) -> torch.Tensor:
        """[R, E]."""
        return self.on_device[:, self.place_of_loads]


class Agreement:
    """Compares this rank with the others. Creating one is collective and compares the settings."""

    def __init__(self, comm: Communicator, settings: str, experts: int, domains: int = 1) -> None:
        self._comm, self._settings, self._experts, self._domains = comm, settings, experts, domains
        self._place_of_loads = slice(len(FIELDS), len(FIELDS) + experts)
        gathered = comm.gather_objects((settings, secrets.token_hex(8)))
        every = [other for other, _ in gathered]
        compare_values("the settings", every, every)
        # Balancers with equal settings differ by the token of rank 0.
        self._balancer = text_digest(settings + gathered[0][1])
        self.flight: Flight | None = None

    def open_flight(self) -> None:
        """Open the flight recorder of this rank, unless it is switched off."""
        self.flight = flight_of(self._balancer, self._comm.rank, self._comm.size)

    def over(self, comm: Communicator) -> Agreement:
        """Return an agreement with the same settings over another communicator; collective."""
        if comm is self._comm:
            return self
        other = Agreement(comm, self._settings, self._experts, self._domains)
        other.flight = self.flight
        return other

    def gather_loads(
        self,
        place: Position,
        loads_E: torch.Tensor,
        *,
        signature: str,
        refused: torch.Tensor | int,
        tokens: int = 0,
        crossing_D: torch.Tensor | None = None,
    ) -> Records:
        """Gather the records of all ranks with their loads; compares only the place.

        signature: of weights and inputs; its digest is sent.
        """
        record = self._record(place, loads_E.device, text_digest(signature), 0, tokens)
        record[REFUSED] = refused
        record[self._place_of_loads] = loads_E
        if crossing_D is not None:
            record[self._place_of_loads.stop :] = crossing_D
        return self._gather(place, record)

    def gather_numbers(self, place: Position, number: int) -> IntArray:
        """Return [R] a number of every rank; collective."""
        record = self._record(place, torch.device("cpu"))
        record[len(FIELDS)] = number
        return self._gather(place, record).loads[:, 0]

    def compare_inputs(self, records: Records, signature: str) -> None:
        """Raise if a rank refused its input, or if weights or inputs differ in shape or dtype."""
        if records.words[:, REFUSED].any():
            refused = np.flatnonzero(records.column("refused")).tolist()
            raise CommunicationError(
                f"ranks {refused} refused their input; their errors say why", ranks=refused
            )
        if not records.equal:
            place = Position(*records.words[0, PLACE].tolist())
            self._compare_digests(place, records, signature, "the weights or inputs at ")

    def compare(
        self, place: Position, device: torch.device, *, digest: int = 0, description: str = ""
    ) -> None:
        """Raise if ranks are at different places, or if their digests differ; collective.

        description: shown in the error if digests differ.
        """
        if self._comm.size > 1:
            records = self._gather(place, self._record(place, device, digest))
            if not records.equal:
                self._compare_digests(place, records, description)

    def _record(self, place: Position, device: torch.device, *numbers: int) -> torch.Tensor:
        crossing = self._domains if self._domains > 1 else 0
        words = np.zeros(len(FIELDS) + self._experts + crossing, np.int64)
        begin = (self._balancer, *place, *numbers)
        words[: len(begin)] = begin
        return moved(torch.from_numpy(words), device)

    def _gather(self, place: Position, record: torch.Tensor) -> Records:
        meeting = None
        if self.flight is not None and place.at in MEETING_OF:
            meeting = self.flight.meet(MEETING_OF[place.at], place)
        try:
            alone = self._comm.size == 1
            gathered = record[None] if alone else self._comm.all_gather(record)
        except CommunicationError as error:
            if meeting is not None and self.flight is not None:
                self.flight.failed(error)
            error.at(place)
            raise
        if meeting is not None:
            meeting.at("")
        words = gathered.cpu().numpy()
        equal = bool((words[1:, COMPARED] == words[:1, COMPARED]).all())
        records = Records(words, gathered, equal, self._place_of_loads)
        if not equal:
            self._compare_places(place, records)
        return records

    def _compare_places(self, place: Position, records: Records) -> None:
        """Raise if places differ. All ranks have the same records, so all of them get here."""
        balancers = records.column("balancer").tolist()
        if len(set(balancers)) > 1:
            compare_values("the balancer", balancers, self._comm.gather_objects(self._settings))
        places = [Position(*row) for row in records.words[:, PLACE].tolist()]
        compare_positions(places, place)

    def _compare_digests(
        self, place: Position, records: Records, description: str, what: str = ""
    ) -> None:
        """Raise if digests differ; places are equal by now."""
        descriptions = self._comm.gather_objects(description)
        digests = records.column("digest").tolist()
        compare_values(f"{what}{place}", digests, descriptions, place)


@lru_cache(maxsize=1024)
def text_digest(text: str) -> int:
    """Return a 62-bit digest of a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
