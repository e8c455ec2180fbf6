"""CostModel: the config to plan a microbatch with, and the rates that it needs.

Rates are given, or measured once per shape of layer (docs/cost.md): `row` by the network of the
layer on synthetic rows, `copy` by weights through the data plane, `each` and `layer` by experts of
a few bytes. All ranks gather their timings and compute the same integers from them.

Shapes: R ranks, E experts, G groups of rows, C replicas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ultraep.arrays import IntArray
from ultraep.bundle import Bundle, Layout, device_of_bundle, resolve, tensors_of
from ultraep.comm import Communicator, raise_together
from ultraep.config import BalanceConfig, Rates
from ultraep.dispatch import Arrivals
from ultraep.errors import ConfigError, errors_at
from ultraep.inputs import Inputs
from ultraep.ops.products import accumulator
from ultraep.plan import Plan, plan_from_replicas
from ultraep.position import At
from ultraep.replicas import Replicas
from ultraep.runtime.agreement import Agreement
from ultraep.runtime.streams import capturing
from ultraep.topology import Topology

Trial: TypeAlias = Callable[[Plan, Bundle], Replicas]  # replicas of a synthetic plan

BY_TIME = "ultraep"  # the policy that uses rates
UNKNOWN = (
    "its rates are unknown: none were measured before a graph was captured, or the layer has "
    "no `serve`, and BalanceConfig(rates=...) was not given"
)
ROWS = (1, 16, 64, 256, 1024)  # of every home expert, until one takes `ENOUGH`
MOST_ROWS = 32768  # of all home experts
MOST_HOMES = MOST_ROWS // ROWS[1]  # home experts with synthetic rows: a slope needs two counts
ENOUGH = 0.02  # seconds
TURNS = 5  # the quickest counts, because other programs may use the machine
MOST_TURNS = 50  # of very short work
FEW_BYTES = 64  # of an expert whose transfer time is only latency
PRODUCTS = 3  # in training: outputs, gradients of rows, gradients of weights
GRADIENTS = 2  # a gradient is sent, then added

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def _with_rates(config: BalanceConfig, rates: Rates) -> BalanceConfig:
    return replace(config, rates=rates)


class CostModel:
    """The measured rates of one balancer, by layer.

    always: measure them also if plans do not depend on them.
    """

    def __init__(
        self, topology: Topology, comm: Communicator, agreement: Agreement, *, always: bool = False
    ) -> None:
        self._topology, self._comm, self._agreement = topology, comm, agreement
        self._used, self._always = topology.can_replicate, always
        self._of_shape: dict[LayerShape, MeasuredRates] = {}
        self._of_layer: dict[int, MeasuredRates] = {}
        self._logged = False

    def config(self, inputs: Inputs, rows: int, trial: Trial) -> BalanceConfig:
        """Return the config to plan a microbatch with; collective if rates must be measured.

        rows: of all ranks, as all ranks know them.
        trial: makes replicas that can be timed.
        """
        config, layer = inputs.config, inputs.passes.layer
        depends = config.objective == "time" and config.rates is None and config.policy == BY_TIME
        if not (self._used and (depends or self._always)):
            return config
        rates = self._of_layer.get(layer) or self._measured(inputs, trial)
        if not depends:
            return config
        if rates is not None:
            inference = torch.is_inference_mode_enabled()  # no backward pass can follow
            mean = rows // self._topology.experts
            return _with_rates(config, rates.at(mean, inference=inference))
        if not self._logged:
            self._logged = True
            logger.info("layer %d is planned for balance, not for time: %s", layer, UNKNOWN)
        return config

    def predicted_seconds(self, layer: int, rows_G: IntArray) -> float:
        """Return the predicted seconds of stage 6 of a layer; 0.0 if it was not measured."""
        rates = self._of_layer.get(layer)
        return 0.0 if rates is None else rates.seconds(rows_G)

    def rows_to_pay(self, layer: int, given: Rates | None) -> int | None:
        """Return the rows that the busiest rank must save for one replica to pay; None: unknown.

        given: rates that are not measured.
        """
        if given is not None:
            return given.rows_to_pay
        rates = self._of_layer.get(layer)
        return None if rates is None else rates.steps[-1][1].rows_to_pay

    def known(self) -> dict[int, dict[int, dict[str, float]]]:
        """Return the measured rates in microseconds: by layer and smallest number of rows."""
        return {
            layer: {least: rates.microseconds for least, rates in measured.steps}
            for layer, measured in sorted(self._of_layer.items())
        }

    def describe(self, config: BalanceConfig) -> str:
        """Return the objective for `repr(balancer)`."""
        if config.objective == "balance":
            return "objective 'balance'"
        rates = [config.rates] if config.rates else dict.fromkeys(self._of_layer.values())
        return f"objective 'time' ({' and '.join(map(str, rates)) or 'no rates yet'})"

    def _measured(self, inputs: Inputs, trial: Trial) -> MeasuredRates | None:
        """Return the rates of the layer; None if they cannot be measured now. Collective."""
        if None in (inputs.layer.serve, inputs.tokens, inputs.gates):
            return None
        if inputs.passes.recomputed or capturing(inputs.ids.device):
            return None
        layer, shape = inputs.passes.layer, LayerShape.of(inputs)
        if shape not in self._of_shape:
            position = inputs.passes.position(At.RATES)
            inputs.passes.record.at("")
            self._agreement.compare(position, inputs.ids.device)
            with errors_at(position):
                rates = measure(inputs, trial, shape, self._topology, self._comm)
            logger.info("rates of layer %d and all layers of its shape: %s", layer, rates)
            self._of_shape[shape] = rates
        return self._of_layer.setdefault(layer, self._of_shape[shape])


class MeasuredRates(NamedTuple):
    """Rates by the mean number of rows per expert: few rows are free while weights are read.

    steps: smallest number of rows, and the rates from there on; the first also holds for fewer.
    of_group: measured seconds of a group with each of `ROWS`.
    forward: steps of passes without backward; (): as `steps`.
    """

    steps: tuple[tuple[int, Rates], ...]
    of_group: tuple[float, ...] = ()
    forward: tuple[tuple[int, Rates], ...] = ()

    def at(self, rows: int, *, inference: bool = False) -> Rates:
        """Return the rates for a mean number of rows per expert."""
        steps = (inference and self.forward) or self.steps
        return [rates for least, rates in steps if least <= max(rows, steps[0][0])][-1]

    def seconds(self, rows_G: IntArray) -> float:
        """Return the predicted seconds of stage 6 with these groups of rows; 0.0: unknown."""
        if len(self.of_group) < 2:
            return 0.0
        known, rows_G = ROWS[: len(self.of_group)], rows_G[rows_G > 0]
        last, before = self.of_group[-1], self.of_group[-2]
        beyond = np.maximum(rows_G - known[-1], 0).sum() * (last - before) / (known[-1] - known[-2])
        return float(np.interp(rows_G, known, self.of_group).sum() + beyond)

    def __str__(self) -> str:
        return "; ".join(f"from {least} rows {rates}" for least, rates in self.steps)


class LayerShape(NamedTuple):
    """The properties of a layer that determine its rates, the same on all ranks."""

    layout: Layout  # of an expert
    gradient_bytes: int  # of an expert; 0: it is not trained
    row_bytes: int
    resends: bool  # weights are sent again in backward, because other layers use the slots

    @classmethod
    def of(cls, inputs: Inputs) -> LayerShape:
        """Return the shape of the layer of a microbatch."""
        tensors, tokens = resolve(inputs.layer.bundle), inputs.tokens
        assert tokens is not None
        layout = Layout.of(tensors, len(next(iter(tensors.values()))))
        gradient_bytes = sum(
            torch.Size(shape).numel() * accumulator(dtype).itemsize
            for name, shape, dtype in layout.parts
            if any(tensor.requires_grad for tensor in tensors_of(tensors[name]))
        )
        row_bytes = tokens.shape[-1] * tokens.dtype.itemsize
        return cls(layout, gradient_bytes, row_bytes, inputs.shares_slots)


class Timings(NamedTuple):
    """Seconds that one rank has measured."""

    homes: int  # experts that served synthetic rows
    network: list[float]  # for each of `ROWS`, until it takes too long
    idle: list[float]  # filling slots without a replica, turn by turn
    one: list[float]  # with one replica of a few bytes
    small: list[float]  # with one replica of a few bytes from every rank
    whole: list[float]  # the same with the experts of the layer


def measure(
    inputs: Inputs, trial: Trial, shape: LayerShape, topology: Topology, comm: Communicator
) -> MeasuredRates:
    """Return the rates for this shape of layer, the same on all ranks; collective.

    Runs stage 6 of the layer on synthetic rows, and sends weights for synthetic plans.
    """
    bundle, device = inputs.layer.bundle, device_of_bundle(resolve(inputs.layer.bundle))
    homes, replicas_C3 = len(topology.home_experts(comm.rank)), synthetic_replicas(topology)
    few_bytes = {"few": torch.zeros(homes, FEW_BYTES // 4, device=device)}
    no_slots = torch.empty(0, shape.layout.nbytes, dtype=torch.uint8, device=device)

    def replicas(count: int, bundle: Bundle) -> Replicas:
        loads_RE = np.ones((topology.ranks, topology.experts), dtype=np.int64)
        config = BalanceConfig(objective="balance")
        return trial(plan_from_replicas(loads_RE, topology, config, replicas_C3[:count]), bundle)

    def filling(count: int, bundle: Bundle) -> list[float]:
        return _filling(partial(replicas, count, bundle), comm, inputs.ids.device)

    network, failed = list[float](), _Caught()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        home = replicas(0, bundle)
        with failed:  # the other ranks wait for what follows
            network = _network(inputs, home, shape.layout.views(no_slots))
        timings = Timings(
            min(homes, MOST_HOMES),
            network,
            idle=filling(0, few_bytes),
            one=filling(1, few_bytes),
            small=filling(len(replicas_C3), few_bytes),
            whole=filling(len(replicas_C3), bundle),
        )
    raise_together(comm, failed.error)
    return rates_from(comm.gather_objects(timings), len(replicas_C3), shape)


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


def rates_from(ranks: Sequence[Timings], replicas: int, shape: LayerShape) -> MeasuredRates:
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

    def steps(*, trained: bool) -> tuple[tuple[int, Rates], ...]:
        passes, products = (2, PRODUCTS) if trained else (1, 1)
        sends, gradients = 1 + (trained and shape.resends), trained * shape.gradient_bytes
        rates = [
            Rates.from_seconds(
                row=products * row + passes * 2 * shape.row_bytes * per_byte,
                copy=sends * copy + GRADIENTS * gradients * per_byte + products * group,
                each=(sends + trained) * each,
                layer=(sends + trained) * layer,
            )
            for row, group in slopes(network, homes)
        ]
        return tuple(zip(ROWS, rates, strict=False))

    of_group = np.maximum.accumulate(network) / homes if network else np.zeros(0)
    forward, trained = steps(trained=False), shape.gradient_bytes > 0
    whole = steps(trained=True) if trained else forward
    return MeasuredRates(whole, tuple(of_group.tolist()), forward if trained else ())


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


def synthetic_replicas(topology: Topology) -> IntArray:
    """Return [C, 3] expert, host, 1 row: one expert of every rank on the next of its domain."""
    size, placed = topology.domain_size, []
    for rank in range(topology.ranks):
        homes = topology.home_experts(rank)
        host = rank // size * size + (rank + 1) % size
        if len(homes) and host != rank:
            placed.append((int(homes[0]), host, 1))
    return np.array(sorted(placed), dtype=np.int64).reshape(-1, 3)


def _filling(
    make_replicas: Callable[[], Replicas], comm: Communicator, device: torch.device
) -> list[float]:
    """Return the seconds to fill slots, turn by turn from a common start, without the first."""
    seconds = []
    for _ in range(TURNS + 1):
        replicas = make_replicas()  # no slot holds them
        _synchronize(device)
        comm.gather_objects(None)
        begin = time.perf_counter()
        with replicas:
            replicas.tensors()
            _synchronize(device)
            seconds.append(time.perf_counter() - begin)
    return seconds[1:]


def _network(inputs: Inputs, like: Replicas, no_slots: dict[str, torch.Tensor]) -> list[float]:
    """Return the seconds of the network alone for each of `ROWS`, until it takes long."""
    tokens, gates, serve = inputs.tokens, inputs.gates, inputs.layer.serve
    assert tokens is not None
    assert gates is not None
    assert serve is not None
    without: Any = SimpleNamespace(  # what the forward pass of a network uses
        bundle=like.bundle,
        num_homes=like.num_homes,
        kernels=like.kernels,
        possible=False,
        tensors=lambda: dict(no_slots),
        served_rows=lambda _like_AD: None,
    )
    homes, seconds = min(like.num_homes, MOST_HOMES), list[float]()
    for rows in ROWS:
        slow = len(seconds) > 2 and seconds[-1] > ENOUGH
        if not homes or slow or rows * homes > MOST_ROWS:
            break
        arrivals = _synthetic_arrivals(rows, like.num_homes, tokens, gates)
        seconds.append(_quickest(partial(serve, arrivals, without), tokens.device))
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
