"""Measured rates of a group: the time that a row and a replica cost, per shape of layer.

    row     the network of the layer on synthetic rows, on every rank alone: the slope from few to
            many rows per expert; plus the transfer time of a row, from the measured bandwidth
    copy    weights through the data plane, one expert of every rank to the next rank; plus the time
            that one more group of rows takes in the network
    each    the same with experts of a few bytes: the cost of every further replica
    layer   the fixed cost of the first replica

In training, a row takes three products and travels twice, and replicas also send gradients.
All ranks gather their measurements and compute the same integers from them, with two digits.
Rates are not measured in a graph, in backward, or where ranks cannot exchange messages.

Shapes: R ranks, E experts, H home experts of this rank, C replicas, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.bundle import Bundle, Layout, device_of_bundle, resolve, tensors_of
from ultraep.comm import Communicator, raise_together
from ultraep.config import BalanceConfig, Rates
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError
from ultraep.microbatch import Inputs, Replicas
from ultraep.ops.products import accumulator
from ultraep.plan import Plan, plan_from_replicas
from ultraep.topology import Topology

Trial: TypeAlias = Callable[[Plan, Bundle], Replicas]  # replicas of a synthetic plan

ROWS = (1, 16, 64, 256, 1024)  # of every home expert, until one takes `ENOUGH`
MOST_ROWS = 32768  # of all home experts
MOST_HOMES = MOST_ROWS // ROWS[1]  # home experts with synthetic rows: a slope needs two counts
ENOUGH = 0.02  # seconds
TURNS = 5  # the quickest counts, because other programs may use the machine
MOST_TURNS = 50  # of very short work
FEW_BYTES = 64  # of an expert whose transfer time is only latency
PRODUCTS = 3  # in training: outputs, gradients of rows, gradients of weights
GRADIENTS = 2  # a gradient is sent, then added


class Timings(NamedTuple):
    """Seconds that one rank has measured."""

    homes: int  # experts that served synthetic rows
    network: list[float]  # for each of `ROWS`, until it takes too long
    idle: list[float]  # filling slots without a replica, turn by turn
    one: list[float]  # with one replica of a few bytes
    small: list[float]  # with one replica of a few bytes from every rank
    whole: list[float]  # the same with the experts of the layer


@dataclass(frozen=True)
class LayerShape:
    """The properties of a layer that determine its rates, the same on all ranks.

    resends: whether weights are sent again in backward, because other layers use the slots.
    """

    parts: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]  # last: requires gradients
    width: int
    dtype: torch.dtype
    resends: bool

    @classmethod
    def of(cls, inputs: Inputs) -> LayerShape:
        """Return the shape of the layer of a microbatch."""
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
        """Bytes of the gradients of an expert; 0 if no tensor requires them."""
        return sum(
            torch.Size(shape).numel() * accumulator(dtype).itemsize
            for _, shape, dtype, trained in self.parts
            if trained
        )

    @property
    def layout(self) -> Layout:
        """Layout of the tensors of an expert."""
        return Layout(tuple(part[:3] for part in self.parts))


def measure(
    inputs: Inputs, trial: Trial, shape: LayerShape, topology: Topology, comm: Communicator
) -> PriceList:
    """Return the rates for this shape of layer, the same on all ranks; collective.

    Runs stage 6 of the layer on synthetic rows, and sends weights for synthetic plans.
    """
    bundle, device = inputs.layer.bundle, device_of_bundle(resolve(inputs.layer.bundle))
    homes = len(topology.home_experts(comm.rank))
    few_bytes = {"few": torch.zeros(homes, FEW_BYTES // 4, device=device)}
    placed, trials = synthetic_replicas(topology), _Trials(trial, topology)
    filling = partial(trials.seconds, comm, inputs.ids.device)
    own_failure, network = _Caught(), list[float]()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        without = _without_replicas(trials.replicas(placed[:0], bundle), shape.layout, device)
        with own_failure:  # the other ranks wait for this one in what follows
            network = _network(inputs, without)
        timings = Timings(
            min(without.num_homes, MOST_HOMES),
            network,
            idle=filling(placed[:0], few_bytes),
            one=filling(placed[:1], few_bytes),
            small=filling(placed, few_bytes),
            whole=filling(placed, bundle),
        )
    raise_together(comm, own_failure.error)
    return price_list(comm.gather_objects(timings), len(placed), shape)


class _Caught(AbstractContextManager[None]):
    """A block whose error is kept, as a `ConfigError` that it causes."""

    error: ConfigError | None = None

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, Exception):
            self.error = ConfigError(
                f"rates cannot be measured, because the network of the layer raised {error!r}: "
                "mend the network, or pass BalanceConfig(rates=...)"
            )
            self.error.__cause__ = error
        return isinstance(error, Exception)


class _Trials:
    """Replicas of synthetic plans."""

    def __init__(self, trial: Trial, topology: Topology) -> None:
        self._trial, self._topology = trial, topology

    def replicas(self, placed_C3: IntArray, bundle: Bundle) -> Replicas:
        """Return new replicas of a plan: no slot holds them."""
        topology, config = self._topology, BalanceConfig(objective="balance")
        loads_RE = np.ones((topology.ranks, topology.experts), dtype=np.int64)
        plan = plan_from_replicas(loads_RE, topology, config, placed_C3)
        return self._trial(plan, bundle)

    def seconds(
        self, comm: Communicator, device: torch.device, placed_C3: IntArray, bundle: Bundle
    ) -> list[float]:
        """Return the seconds to fill slots, turn by turn from a common start, without the first."""
        seconds = []
        for _ in range(TURNS + 1):
            replicas = self.replicas(placed_C3, bundle)
            _synchronize(device)
            comm.gather_objects(None)
            begin = time.perf_counter()
            with replicas:
                replicas.tensors()
                _synchronize(device)
                seconds.append(time.perf_counter() - begin)
        return seconds[1:]


def price_list(ranks: Sequence[Timings], replicas: int, shape: LayerShape) -> PriceList:
    """Return the rates that follow from the timings of all ranks with this many replicas."""
    homes = max(timings.homes for timings in ranks)
    networks = [timings.network for timings in ranks if timings.homes == homes]
    # The shortest list counts. The quickest time counts, because interference only adds time.
    network = [min(seconds) for seconds in zip(*networks, strict=False)]
    idle, one, small, whole = (
        min(max(turn) for turn in zip(*(getattr(timings, name) for timings in ranks), strict=True))
        for name in ("idle", "one", "small", "whole")
    )
    copy = max(0.0, whole - small)
    each = max(0.0, small - one) / max(1, replicas - 1)
    layer = max(0.0, one - idle - each)
    per_byte = copy / shape.layout.nbytes
    trained, row_bytes = shape.gradient_bytes > 0, shape.width * shape.dtype.itemsize
    passes, products = (2, PRODUCTS) if trained else (1, 1)
    sends = 1 + (trained and shape.resends)
    rates = [
        Rates.from_seconds(
            row=products * row + passes * 2 * row_bytes * per_byte,
            copy=sends * copy + GRADIENTS * shape.gradient_bytes * per_byte + products * group,
            each=(sends + trained) * each,
            layer=(sends + trained) * layer,
        )
        for row, group in slopes(network, homes)
    ]
    of_group = np.maximum.accumulate(network) / homes if network else np.zeros(0)
    return PriceList(tuple(zip(ROWS, rates, strict=False)), tuple(of_group.tolist()))


def slopes(seconds: Sequence[float], homes: int) -> list[tuple[float, float]]:
    """Return the time of one more row and of one more group, from each of `ROWS` to the next.

    >>> slopes([3.0, 33.0, 129.0], homes=1)  # 1, 16 and 64 rows
    [(2.0, 1.0), (2.0, 1.0)]
    """
    result = []
    for (few, short), (many, long) in pairwise(zip(ROWS, seconds, strict=False)):
        row = max(0.0, long - short) / (homes * (many - few))  # interference can make it negative
        result.append((row, max(0.0, short / homes - row * few)))
    return result


@dataclass(frozen=True)
class PriceList:
    """Rates by the mean number of rows per expert: few rows are free while weights are read.

    steps: smallest number of rows, and the rates from there on; the first also holds for fewer.
    of_group: measured seconds of a group with each of `ROWS`.
    """

    steps: tuple[tuple[int, Rates], ...]
    of_group: tuple[float, ...] = ()

    def at(self, rows: int) -> Rates:
        """Return the rates for a mean number of rows per expert."""
        return [rates for least, rates in self.steps if least <= max(rows, self.steps[0][0])][-1]

    def seconds(self, rows_L: IntArray) -> float:
        """Return the predicted seconds of stage 6 with these groups of rows; 0.0: unknown."""
        if len(self.of_group) < 2:
            return 0.0
        known, rows_L = ROWS[: len(self.of_group)], rows_L[rows_L > 0]
        last, before = self.of_group[-1], self.of_group[-2]
        beyond = np.maximum(rows_L - known[-1], 0).sum() * (last - before) / (known[-1] - known[-2])
        return float(np.interp(rows_L, known, self.of_group).sum() + beyond)

    def __str__(self) -> str:
        return "; ".join(f"from {least} rows {rates}" for least, rates in self.steps)


def synthetic_replicas(topology: Topology) -> IntArray:
    """Return [C, 3] expert, host, 1 row: one expert of every rank on the next of its domain."""
    size, placed = topology.domain_size, []
    for rank in range(topology.ranks):
        homes = topology.home_experts(rank)
        first = rank // size * size
        host = first + (rank - first + 1) % size
        if len(homes) and host != rank:
            placed.append((int(homes[0]), host, 1))
    return np.array(sorted(placed), dtype=np.int64).reshape(-1, 3)


def _network(inputs: Inputs, without: Replicas) -> list[float]:
    """Return the seconds of the network of this rank for each of `ROWS`, until it takes long."""
    tokens, gates, serve = inputs.tokens, inputs.gates, inputs.layer.serve
    assert tokens is not None
    assert gates is not None
    assert serve is not None
    seconds: list[float] = []
    for rows in ROWS if without.num_homes else ():
        slow = len(seconds) > 2 and seconds[-1] > ENOUGH
        if slow or rows * min(without.num_homes, MOST_HOMES) > MOST_ROWS:
            break
        arrivals = _synthetic_arrivals(rows, without.num_homes, tokens, gates)
        work = partial(serve, arrivals, without)
        seconds.append(_quickest(work, tokens.device))
    return seconds


def _synthetic_arrivals(rows: int, homes: int, like: torch.Tensor, gates: torch.Tensor) -> Arrivals:
    """Return seeded rows for each of the first `MOST_HOMES` home experts."""
    generator = torch.Generator(like.device).manual_seed(0)
    shape = rows * min(homes, MOST_HOMES), like.shape[-1]
    values = torch.randn(shape, generator=generator, device=like.device).to(like.dtype)
    begins = [min(rows * index, len(values)) for index in range(homes + 1)]
    offsets = torch.tensor(begins, dtype=torch.int32, device=like.device)
    exchange: Any = SimpleNamespace(offsets=offsets, begins=lambda: begins)  # what a network uses
    return Arrivals(values, gates.new_ones(len(values)), exchange)


def _without_replicas(like: Replicas, layout: Layout, device: torch.device) -> Replicas:
    """Return no replicas and no slots, for a network that is timed alone."""
    no_slots = {
        name: torch.empty(0, *shape, dtype=dtype, device=device)
        for name, shape, dtype in layout.parts
    }
    replicas: Any = SimpleNamespace(  # what the forward pass of a network uses
        bundle=like.bundle,
        num_homes=like.num_homes,
        kernels=like.kernels,
        possible=False,
        tensors=lambda: dict(no_slots),
        served_rows=lambda _like_AD: None,
    )
    return cast(Replicas, replicas)


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the quickest of several turns, after one that does not count."""
    seconds: list[float] = []
    while len(seconds) <= TURNS or (sum(seconds) < ENOUGH and len(seconds) <= MOST_TURNS):
        _synchronize(device)
        begin = time.perf_counter()
        work()
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
        if sum(seconds) > 10 * ENOUGH and len(seconds) > 2:
            break
    return min(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
