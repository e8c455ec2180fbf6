"""All turns of the engine: every variant, at every rate, in every round, by ranks of this machine.

Before the first turn, some seconds of calibration on the model itself find the size of
microbatches, the rows from which a copy pays, and the rates to try.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.tools.launch.group import process_group, settle
from ultraep.tools.launch.processes import RankPlace, run_ranks
from ultraep.tools.serving.engine import Engine, from_first
from ultraep.tools.serving.load import Arrival, LoadOptions, make_prompts
from ultraep.tools.serving.measure import Turn
from ultraep.tools.serving.model import ModelFacts, TransformersModel, facts_of
from ultraep.tools.serving.variants import NONE, check_variants

ROUTINGS = ("own", "even")
MOST_RANKS = 64
WANTED = 0.5  # seconds of a full microbatch
SMALLEST, LARGEST, STEP = 32, 4096, 16  # tokens of a rank in a microbatch
FULL, TRIALS = 4, 3  # microbatches of a trial, and trials, of which the quickest counts
PAYS = 2.0  # a copy is to save so many times its cost
SEED = 1 << 20  # of trials; rounds have smaller numbers

Tell = Callable[[Any], None]  # called with `Calibrated`, then with every `Turn`


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine: ranks of this machine that serve a model of transformers.

    model: folder of a checkpoint; None: random.   variants: what is compared.
    budget: most tokens of a rank in a microbatch; None: calibrated.
    routing: "own" of the model, or "even" for all variants.
    """

    load: LoadOptions
    variants: tuple[str, ...] = ("none", "eplb", "ultraep", "even")
    ranks: int = 2
    slots: int = 2
    model: str | None = None
    budget: int | None = None
    routing: str = "own"

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MOST_RANKS:
            raise ConfigError(f"--ranks must lie between 1 and {MOST_RANKS}, got {self.ranks}")
        if self.slots < 0:
            raise ConfigError(f"--slots must not be negative, got {self.slots}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"--budget must be at least 1, got {self.budget}")
        if self.routing not in ROUTINGS:
            raise ConfigError(f"--routing is one of {', '.join(ROUTINGS)}, got {self.routing!r}")


def check(options: EngineOptions) -> ModelFacts:
    """The facts of the model, if it can be served and all prompts fit it."""
    check_variants(options.variants)
    facts = facts_of(options.model)
    if options.load.longest > facts.longest:
        raise ConfigError(
            f"prompts of up to {options.load.longest} tokens, but {facts.name} takes "
            f"{facts.longest}: lower --longest, or the tokens of --arrivals"
        )
    if options.ranks > facts.experts:
        raise ConfigError(f"--ranks {options.ranks}, but {facts.name} has {facts.experts} experts")
    return facts


def run(options: EngineOptions, tell: Tell) -> None:
    """Start the ranks, and pass on what they measure. On interruption they end."""
    run_ranks("ultraep.tools.serving.run:work", options, options.ranks, tell)


def work(place: RankPlace, options: EngineOptions, tell: Tell) -> None:
    """One rank; rank 0 alone reports."""
    settle(place, "cpu")
    report: Tell = tell if place.rank == 0 else lambda _: None
    with process_group(place), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # slow then
        model = TransformersModel(
            options.model,
            dist.new_group(),  # its messages do not mix with those of the engine
            options.load.seed,
            slots=options.slots,
            policy=NONE,
            in_flight=facts_of(options.model).layers,  # slots for every layer: copies stay
        )
        model.check_packing()
        for balancer in model.balancers:
            balancer.config = BalanceConfig(policy=NONE, objective="balance")
        engine = Engine(model, routing=options.routing)
        calibrated = calibrate(engine, options, model.bytes_per_token)
        report(calibrated)
        for variant, rate, number in options.load.turns(options.variants, calibrated.rates):
            prompts = options.load.prompts(rate, number, model.bytes_per_token)
            report(engine.serve(prompts, variant, rate, number))
        for balancer in model.balancers:
            balancer.close()


# -- calibration ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibrated:
    """Speeds of the engine, and settings that follow from them.

    budget: most tokens of a rank in a microbatch.   min_tokens: rows from which a copy pays.
    """

    budget: int
    min_tokens: int
    row_seconds: float  # of the processor, for a row in an expert
    copy_seconds: float  # of an expert that is copied
    tokens_per_second: float  # of all ranks, unbalanced, when there is always enough to do
    rates: tuple[float, ...]  # prompts a second that will be tried


def calibrate(engine: Engine, options: EngineOptions, bytes_per_token: int) -> Calibrated:
    """Set up the engine, and return how; collective."""

    def trial(variant: str) -> Turn:
        """Some full microbatches, of prompts that are all there at once."""
        tokens = FULL * engine.ranks * engine.budget
        count = max(engine.ranks, round(tokens / lengths.mean))
        seed = [options.load.seed, SEED]
        prompts = make_prompts([Arrival(0.0)] * count, lengths, seed, bytes_per_token)
        for balancer in engine.model.balancers:
            balancer.reset_stats()
        return engine.serve(prompts, variant, math.inf, SEED)

    lengths = options.load.lengths
    engine.budget = options.budget or engine.budget
    trial(NONE)  # warms up
    trial("ultraep")
    if options.budget is None:
        fitting = WANTED * max(speed(trial(NONE)) for _ in range(TRIALS)) / engine.ranks
        engine.budget = from_first(min(LARGEST, max(SMALLEST, STEP * round(fitting / STEP))))
    speeds, rows, copies = [], [], []
    for _ in range(TRIALS):
        speeds.append(speed(trial(NONE)))
        rows.append(row_seconds(engine))
        engine.routing = "own"  # even choices need no copies, so their cost would not show
        trial("ultraep")
        engine.routing = options.routing
        copies.append(copy_seconds(engine))
    row, copy, fastest = min(rows), min(copies), from_first(max(speeds))
    engine.min_tokens = max(1, math.ceil(PAYS * copy / row)) if row else 1
    return Calibrated(
        budget=engine.budget,
        min_tokens=engine.min_tokens,
        row_seconds=row,
        copy_seconds=copy,
        tokens_per_second=fastest,
        rates=options.load.known_rates() or rates_of(options.load, fastest),
    )


def rates_of(load: LoadOptions, tokens_per_second: float) -> tuple[float, ...]:
    """Prompts a second for every share of what can be served, to two digits."""
    most = tokens_per_second / load.lengths.mean
    return tuple(dict.fromkeys(float(f"{share * most:.2g}") for share in load.shares))


def speed(turn: Turn) -> float:
    """Tokens a second."""
    return sum(turn.tokens) / turn.seconds


def row_seconds(engine: Engine) -> float:
    """Processor time of a row in an expert in the last turn, the mean of all ranks."""
    return float(_over_ranks(sum(engine.sums.busy) / max(1, engine.sums.rows)).mean())


def copy_seconds(engine: Engine) -> float:
    """Time of a copy in the last turn, on the rank where it took longest."""
    stats = [balancer.stats() for balancer in engine.model.balancers]
    most = float(_over_ranks(sum(int(of["weights_copies_sent"]) for of in stats)).max())
    spent = float(_over_ranks(sum(float(of["seconds"]["replicate"]) for of in stats)).max())
    return spent / most if most else 0.0


def _over_ranks(value: float) -> torch.Tensor:
    """[R] the value of every rank; collective."""
    values = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64))
    return torch.cat(values)
