"""Rates of a group, measured: what rows and copies cost here, once for each kind of layer.

    row     the network of the layer on made-up rows, on every rank alone: what more of them take,
            from a few of every expert to many; and the way of a row, by the bytes per second of
            copies
    copy    weights through the data plane, one expert of every rank to the next; and what one more
            group of rows takes in the network
    each    the same with experts of a few bytes: what every further copy takes
    layer   and what the first one takes

In training, products are made three times, rows travel twice, and copies also carry gradients back.
All ranks tell each other what they have found, and conclude the same integers from it, with two
digits. Nothing is measured in a graph, in backward, or where ranks cannot speak to each other.

Shapes: R ranks, E experts, H home experts of this rank, C copies, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeAlias, cast

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.bundle import Bundle, Layout, device_of_bundle, resolve, tensors_of
from ultraep.comm import Communicator
from ultraep.config import BalanceConfig, Rates
from ultraep.dispatch import Arrivals
from ultraep.microbatch import Inputs, Replicas
from ultraep.ops.products import accumulator
from ultraep.plan import Plan, plan_from_replicas
from ultraep.topology import Topology

Trial: TypeAlias = Callable[[Plan, Bundle, int], Replicas]  # of a synthetic plan, by number

ROWS = (1, 16, 64, 256, 1024)  # of every home expert, until they take `ENOUGH`
MOST_ROWS = 32768  # of all of them
MOST_HOMES = MOST_ROWS // ROWS[1]  # experts that get synthetic rows: slopes need two row counts
ENOUGH = 0.02  # seconds
TURNS = 5  # of which the quickest counts, as others may use the machine
MOST_TURNS = 50  # of what takes no time
FEW_BYTES = 64  # of an expert whose way costs nothing by its length
PRODUCTS = 3  # in training: outputs, gradients of rows, gradients of weights
GRADIENTS = 2  # times that a gradient passes: sent, then added


class Found(NamedTuple):
    """Seconds that one rank has found."""

    homes: int  # experts that served synthetic rows
    network: list[float]  # for each of `ROWS`, as far as that is quick
    idle: list[float]  # filling slots without a copy, turn by turn
    one: list[float]  # with one of a few bytes
    small: list[float]  # with one of a few bytes from every rank
    whole: list[float]  # the same with the experts of the layer


@dataclass(frozen=True)
class Kind:
    """What the costs of a layer depend on, alike on all ranks.

    again: whether copies are sent again in backward, since other layers use the slots meanwhile.
    """

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]  # with what learns
    width: int
    dtype: torch.dtype
    again: bool

    @classmethod
    def of(cls, inputs: Inputs) -> Kind:
        """That of the layer of a microbatch."""
        tensors = resolve(inputs.layer.bundle)
        layout = Layout.of(tensors, len(next(iter(tensors.values()))))
        parts = tuple(
            (*part, any(t.requires_grad for t in tensors_of(tensors[part[0]])))
            for part in layout.parts
        )
        assert inputs.tokens is not None
        return cls(parts, inputs.tokens.shape[-1], inputs.tokens.dtype, inputs.shares_slots)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of an expert's gradients; 0: nothing of it learns."""
        return sum(
            torch.Size(shape).numel() * accumulator(dtype).itemsize
            for _, shape, dtype, learns in self.parts
            if learns
        )

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def layout(self) -> Layout:
        """Where the tensors of an expert stand."""
        return Layout(tuple(part[:3] for part in self.parts))


def measure(
    inputs: Inputs, trial: Trial, kind: Kind, topology: Topology, comm: Communicator
) -> PriceList:
    """The rates of this kind of layer, alike on all ranks; collective.

    Stage 6 of the layer runs on synthetic rows, and weights move for synthetic plans.
    """
    bundle, device = inputs.layer.bundle, device_of_bundle(resolve(inputs.layer.bundle))
    homes = len(topology.home_experts(comm.rank))
    trials = _Trials(trial, comm, topology, inputs.ids.device)
    few = {"few": torch.zeros(homes, FEW_BYTES // 4, device=device)}
    every = made_up_copies(topology)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        nobody = NoReplicas(trials.replicas([], bundle), kind.layout, device)
        found = Found(
            min(nobody.num_homes, MOST_HOMES),
            _network(inputs, nobody),
            idle=trials.seconds(every[:0], few),
            one=trials.seconds(every[:1], few),
            small=trials.seconds(every, few),
            whole=trials.seconds(every, bundle),
        )
    told = comm.gather_objects(found)
    return concluded(told, len(every), kind)


def concluded(told: Sequence[Found], copies: int, kind: Kind) -> PriceList:
    """The rates that follow from what all ranks have found, with so many copies at once."""
    homes = max(found.homes for found in told)
    networks = [found.network for found in told if found.homes == homes]
    # As far as all ranks have come; what others do to a machine only ever adds time.
    network = [min(seconds) for seconds in zip(*networks, strict=False)]
    idle, one, small, whole = (
        min(max(turn) for turn in zip(*(getattr(found, name) for found in told), strict=True))
        for name in ("idle", "one", "small", "whole")
    )
    copy = max(0.0, whole - small)
    each = max(0.0, small - one) / max(1, copies - 1)
    layer = max(0.0, one - idle - each)
    per_byte = copy / kind.layout.nbytes
    learns = kind.gradient_bytes > 0
    passes, products = (2, PRODUCTS) if learns else (1, 1)
    sends = 1 + (learns and kind.again)
    found_rates = []
    for row, group in slopes(network, homes):
        rates = Rates.from_seconds(
            row=products * row + passes * 2 * kind.row_bytes * per_byte,
            copy=sends * copy + GRADIENTS * kind.gradient_bytes * per_byte + products * group,
            each=(sends + learns) * each,
            layer=(sends + learns) * layer,
        )
        found_rates.append(rates)
    return PriceList(tuple(zip(ROWS, found_rates, strict=False)))


def slopes(seconds: Sequence[float], homes: int) -> list[tuple[float, float]]:
    """What one more row takes, and one more group of rows, from each of `ROWS` to the next.

    >>> slopes([3.0, 33.0, 129.0], homes=1)  # 1, 16 and 64 rows
    [(2.0, 1.0), (2.0, 1.0)]
    """
    found = []
    for (few, short), (many, long) in pairwise(zip(ROWS, seconds, strict=False)):
        row = max(0.0, long - short) / (homes * (many - few))  # less: others were at work
        found.append((row, max(0.0, short / homes - row * few)))
    return found


@dataclass(frozen=True)
class PriceList:
    """Rates by the rows of an expert: where weights take longer to read than rows, these are free.

    steps: from so many rows of every expert on, on average, these rates; the first also for fewer.
    """

    steps: tuple[tuple[int, Rates], ...]

    def at(self, rows: int) -> Rates:
        """The rates for so many rows of an expert, on average."""
        found = self.steps[0][1]
        for least, rates in self.steps:
            if least <= rows:
                found = rates
        return found

    def __str__(self) -> str:
        return "; ".join(f"from {least} rows {rates}" for least, rates in self.steps)


def made_up_copies(topology: Topology) -> IntArray:
    """[C, 3] expert, host, one token: of every rank one expert on the next rank of its domain."""
    size, found = topology.domain_size, []
    for rank in range(topology.ranks):
        mine = topology.home_experts(rank)
        first = rank // size * size
        host = first + (rank - first + 1) % size
        if len(mine) and host != rank:
            found.append((int(mine[0]), host, 1))
    return np.array(sorted(found), dtype=np.int64).reshape(-1, 3)


class _Trials:
    """Times how long slots take to fill, for synthetic plans."""

    def __init__(
        self, trial: Trial, comm: Communicator, topology: Topology, device: torch.device
    ) -> None:
        self._trial, self._comm, self._topology, self._device = trial, comm, topology, device
        self._number = 0

    def replicas(self, placed_C3: Any, bundle: Bundle) -> Replicas:
        """Replicas of such a plan, as if they had never been sent."""
        topology = self._topology
        tokens_RE = np.ones((topology.ranks, topology.experts), dtype=np.int64)
        placed = np.asarray(placed_C3, dtype=np.int64).reshape(-1, 3)
        plan: Plan = plan_from_replicas(
            tokens_RE, topology, BalanceConfig(objective="balance"), placed
        )
        self._number += 1
        return self._trial(plan, bundle, self._number)

    def seconds(self, placed_C3: IntArray, bundle: Bundle) -> list[float]:
        """Seconds of this rank, turn by turn, from a common start; the first allocates memory."""
        seconds = []
        for _ in range(TURNS + 1):
            replicas = self.replicas(placed_C3, bundle)
            _wait(self._device)
            self._comm.gather_objects(None)
            begin = time.perf_counter()
            with replicas:
                replicas.tensors()
                _wait(self._device)
                seconds.append(time.perf_counter() - begin)
        return seconds[1:]


def _network(inputs: Inputs, nobody: NoReplicas) -> list[float]:
    """Seconds that the network of this rank takes for each of `ROWS`, as far as that is quick."""
    tokens, gates, serve = inputs.tokens, inputs.gates, inputs.layer.serve
    assert tokens is not None
    assert gates is not None
    assert serve is not None
    seconds: list[float] = []
    for each in ROWS if nobody.num_homes else ():
        slow = len(seconds) > 2 and seconds[-1] > ENOUGH
        if slow or each * min(nobody.num_homes, MOST_HOMES) > MOST_ROWS:
            break
        arrivals = made_up_arrivals(each, nobody.num_homes, tokens, gates)
        seconds.append(_quickest(partial(serve, arrivals, cast(Replicas, nobody)), tokens.device))
    return seconds


def made_up_arrivals(each: int, homes: int, rows: torch.Tensor, gates: torch.Tensor) -> Arrivals:
    """`each` seeded synthetic rows for each of the first `MOST_HOMES` home experts."""
    generator = torch.Generator(rows.device).manual_seed(0)
    shape, device = (each * min(homes, MOST_HOMES), rows.shape[-1]), rows.device
    made = torch.randn(shape, generator=generator, device=device).to(rows.dtype)
    begins = [min(each * index, len(made)) for index in range(homes + 1)]
    return Arrivals(made, gates.new_ones(len(made)), _Begins(begins, device))  # type: ignore[arg-type]


class _Begins:
    """What a network asks an exchange for."""

    def __init__(self, begins: list[int], device: torch.device) -> None:
        self._begins = begins
        self.offsets = torch.tensor(begins, dtype=torch.int32, device=device)

    def begins(self) -> list[int]:
        return self._begins


class NoReplicas:
    """No replicas and no slots: for a network that is timed alone."""

    possible = False

    def __init__(self, like: Replicas, layout: Layout, device: torch.device) -> None:
        self.num_homes, self.sms, self.kernels = like.num_homes, like.sms, like.kernels
        self.bundle = like.bundle
        self._tensors = {
            name: torch.empty(0, *shape, dtype=dtype, device=device)
            for name, shape, dtype in layout.parts
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was lent."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """`[0, ...]` for every tensor of the bundle."""
        return dict(self._tensors)

    def served_rows(self, like_AD: torch.Tensor) -> None:
        """Any memory will do."""


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the work, of several turns after one that does not count."""
    found: list[float] = []
    while len(found) <= TURNS or (sum(found) < ENOUGH and len(found) <= MOST_TURNS):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        found.append(time.perf_counter() - begin)
        if sum(found) > 10 * ENOUGH and len(found) > 2:
            break
    return min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
