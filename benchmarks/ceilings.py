"""Three ceilings of a layer on one card, timed in turn with what they are a ceiling of.

    random even     every token chooses its experts by chance, all alike: what frameworks call
                    forced balance
    tile-perfect    likewise, but every expert gets the same number of rows, a multiple of a tile
    matmul peak     plain products of large matrices by torch, on the whole card

A card under load is as fast as its power allows: products that run alone for a moment are faster
than those of a layer can be. So all of them take turns, and clock and power are told.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from harness import Metric, Values
from layer_card import LAUNCHING, Size, World
from load_cases import loads_of, random_even_ids, tile_perfect_ids
from timing import Call, in_turn_us

import ultraep
from ultraep import BalanceConfig, Plan, Topology

RANDOM_EVEN, TILE_PERFECT, MATMUL = "random even", "tile-perfect", "matmul"
DRAWN: dict[str, Callable[[Size, int], torch.Tensor]] = {
    RANDOM_EVEN: random_even_ids,
    TILE_PERFECT: tile_perfect_ids,
}
OF_RANDOM = Metric("share_of_random_even", "ratio", "of random", ".3f")
OF_TILES = Metric("share_of_tile_perfect", "ratio", "of tiles", ".3f")
OF_MATMUL = Metric("share_of_matmul_peak", "ratio", "of matmul", ".3f")
RANDOM_MS = Metric("random_even_time_p50", "ms", "random ms", ".2f")
TILES_MS = Metric("tile_perfect_time_p50", "ms", "tiles ms", ".2f")
TAX = Metric("random_even_over_tile_perfect", "ratio", "random / tiles", ".3f")
PEAK = Metric("matmul_rate", "TFLOP/s", "matmul", ".0f")
CLOCK = Metric("sm_clock", "MHz", "MHz", ".0f")
POWER = Metric("power", "W", "W", ".0f")
SIDE, PRODUCTS = 8192, 60  # of the plain products: as long as a step
WARMUP = 3


@dataclass(frozen=True)
class Seen:
    """Milliseconds of a step, and of the ceilings in turn with it."""

    ms: float
    ceilings: dict[str, float]
    clock: float | None
    power: float | None

    def shares(self, ms: float) -> Values:
        """Of the two kinds of even routing, by a step of so many milliseconds."""
        return {
            OF_RANDOM: self.ceilings[RANDOM_EVEN] / ms,
            OF_TILES: self.ceilings[TILE_PERFECT] / ms,
        }

    def values(self, flops: float) -> Values:
        """All shares, by a step of so many operations, and what they are shares of."""
        peak = PRODUCTS * 2 * SIDE**3 / self.ceilings[MATMUL] / 1e9
        return {
            **self.shares(self.ms),
            OF_MATMUL: flops / self.ms / 1e9 / peak,
            RANDOM_MS: self.ceilings[RANDOM_EVEN],
            TILES_MS: self.ceilings[TILE_PERFECT],
            TAX: self.ceilings[RANDOM_EVEN] / self.ceilings[TILE_PERFECT],
            PEAK: peak,
            CLOCK: self.clock,
            POWER: self.power,
        }


class Ceilings:
    """A world without copies that runs both kinds of even routing, and plain products."""

    def __init__(self, world: World) -> None:
        self.world, size = world, world.size
        self.ids = {kind: drawn(size, kind) for kind in DRAWN}
        plans = [even_plan(size, kind) for kind in DRAWN]
        fullest = max(plans, key=lambda plan: int(plan.rank_loads.max()))
        world.regroup(fullest, capacity_of(fullest))
        world.choose(self.ids[RANDOM_EVEN])
        world.capture()
        world.replay()
        world.check()
        left, right = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
        self._matrices = left, right, torch.empty_like(left)

    def _multiply(self) -> None:
        left, right, out = self._matrices
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    def in_turn_with(self, step: Call, rounds: int) -> Seen:
        """Milliseconds of a step and of all ceilings."""
        wait = torch.cuda.synchronize
        turns: dict[str, tuple[Call, Call]] = {"step": (wait, step), MATMUL: (wait, self._multiply)}
        for kind, ids in self.ids.items():
            turns[kind] = (lambda ids=ids: self.world.choose(ids)), self.world.replay  # type: ignore[misc]
        found = in_turn_us(turns, rounds, warmup=WARMUP, cycles=LAUNCHING)
        clock, power = told_under(step)
        self.world.check()
        ms = {name: us / 1e3 for name, us in found.items()}
        return Seen(ms.pop("step"), ms, clock, power)

    def breakdown(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Stages of a step of either kind of even routing."""
        found = {}
        for kind, ids in self.ids.items():
            self.world.choose(ids)
            found[kind] = self.world.breakdown()
        return found


def drawn(size: Size, kind: str) -> list[torch.Tensor]:
    """[T, K] ids of every rank, by the kind of even routing."""
    return [DRAWN[kind](size, rank) for rank in range(size.ranks)]


def even_plan(size: Size, kind: str) -> Plan:
    """By which even routing is served: every row at its home."""
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=0)
    loads = loads_of(drawn(size, kind), size)
    return ultraep.plan(loads, topology, BalanceConfig(policy="none"))


def capacity_of(plan: Plan) -> int:
    """Rows that a rank has room for, a little more than it needs."""
    return -(-int(plan.rank_loads.max() * 1.02) // 256) * 256


def told_under(step: Call) -> tuple[float | None, float | None]:
    """MHz and watts that the card tells in the middle of some steps, where a program asks it."""
    if shutil.which("nvidia-smi") is None:
        return None, None
    for _ in range(8):
        step()
    asked = "--query-gpu=clocks.sm,power.draw"
    command: Sequence[str] = ("nvidia-smi", asked, "--format=csv,noheader,nounits", "--id=0")
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    torch.cuda.synchronize()
    clock, power = (float(part) for part in told.split(","))
    return clock, power
