"""How fast the engine is: the size of microbatches, when a copy pays, and which rates to try.

All of it is measured on the model itself, in some seconds, before the first turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ultraep.tools.serving.arrivals import Arrival
from ultraep.tools.serving.asked import EngineAsked
from ultraep.tools.serving.engine import Engine, from_first
from ultraep.tools.serving.measure import Turn
from ultraep.tools.serving.prompts import Prompt, make_prompts, mean_tokens
from ultraep.tools.serving.variants import NONE

WANTED = 0.5  # seconds of a full microbatch
SMALLEST, LARGEST, STEP = 32, 4096, 16  # tokens of a rank in a microbatch
FULL, TRIALS = 4, 3  # microbatches of a trial, and trials, of which the quickest counts
PAYS = 2.0  # a copy is to save so many times what it costs
SEED = 1 << 20  # of rounds that are none


@dataclass(frozen=True)
class Calibrated:
    """What was found.

    budget: most tokens of a rank in a microbatch.   min_tokens: that a copy has to serve.
    """

    budget: int
    min_tokens: int
    row_seconds: float  # of the processor, for a row in an expert
    copy_seconds: float  # of an expert that is copied
    tokens_per_second: float  # of all ranks, unbalanced, when there is always enough to do
    rates: tuple[float, ...]  # prompts a second that will be tried


def calibrate(engine: Engine, asked: EngineAsked, bytes_per_token: int) -> Calibrated:
    """Set up the engine, and tell how; collective."""
    trial = Trial(engine, asked, bytes_per_token)
    trial.run(NONE)  # warms up
    trial.run("ultraep")
    if asked.budget is None:
        fitting = WANTED * max(speed(trial.run(NONE)) for _ in range(TRIALS)) / engine.ranks
        engine.budget = from_first(min(LARGEST, max(SMALLEST, STEP * round(fitting / STEP))))
    speeds, rows, copies = [], [], []
    for _ in range(TRIALS):
        speeds.append(speed(trial.run(NONE)))
        rows.append(trial.row_seconds())
        engine.routing = "own"  # even choices need no copies, and so do not tell what they cost
        trial.run("ultraep")
        engine.routing = asked.routing
        copies.append(trial.copy_seconds())
    row, copy, fastest = min(rows), min(copies), from_first(max(speeds))
    engine.min_tokens = max(1, math.ceil(PAYS * copy / row)) if row else 1
    return Calibrated(
        budget=engine.budget,
        min_tokens=engine.min_tokens,
        row_seconds=row,
        copy_seconds=copy,
        tokens_per_second=fastest,
        rates=asked.load.known_rates() or rates_of(asked, fastest),
    )


def rates_of(asked: EngineAsked, tokens_per_second: float) -> tuple[float, ...]:
    """Prompts a second for every share of what can be served, to two digits."""
    most = tokens_per_second / mean_tokens(asked.load.lengths)
    return tuple(dict.fromkeys(float(f"{share * most:.2g}") for share in asked.load.shares))


def speed(turn: Turn) -> float:
    """Tokens a second."""
    return sum(turn.tokens) / turn.seconds


class Trial:
    """Prompts that are all there at once, so that microbatches are full."""

    def __init__(self, engine: Engine, asked: EngineAsked, bytes_per_token: int) -> None:
        self.engine, self._load, self._bytes = engine, asked.load, bytes_per_token
        engine.budget = asked.budget or engine.budget

    def run(self, variant: str) -> Turn:
        """Some full microbatches."""
        for owner in self.engine.owners:
            owner.reset_stats()
        return self.engine.serve(self._prompts(), variant, math.inf, SEED)

    def _prompts(self) -> list[Prompt]:
        tokens = FULL * self.engine.ranks * self.engine.budget
        count = max(self.engine.ranks, round(tokens / mean_tokens(self._load.lengths)))
        seed = [self._load.seed, SEED]
        return make_prompts([Arrival(0.0)] * count, self._load.lengths, seed, self._bytes)

    def row_seconds(self) -> float:
        """Processor time of a row in an expert in the last trial, the mean of all ranks."""
        sums = self.engine.sums
        return float(_over_ranks(sum(sums.busy) / max(1, sums.rows)).mean())

    def copy_seconds(self) -> float:
        """Time of a copy in the last trial, on the rank where it took longest."""
        sent = sum(int(owner.stats()["weights_copies_sent"]) for owner in self.engine.owners)
        most = float(_over_ranks(sent).max())
        spent = sum(float(o.stats()["seconds"]["replicate"]) for o in self.engine.owners)
        return float(_over_ranks(spent).max()) / most if most else 0.0


def _over_ranks(value: float) -> torch.Tensor:
    """[R] what every rank has; collective."""
    found = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([value], dtype=torch.float64))
    return torch.cat(found)
