"""Memory of a layer per rank: unbalanced, balanced, and with a static row capacity.

    python benchmarks/bench_memory.py            # measured on a GPU, counted elsewhere
    python benchmarks/bench_memory.py --toy      # tiny, for CI

All ranks have buffers of the same size. Bytes of one rank, without its weights:

    none              every row goes to its home: capacity for the rows of the busiest rank
    ultraep, 1 slot   `capacity="auto"`: twice the rows of a rank
    ultraep, planned  the same with the capacity that the plan of these loads needs
    static            as many slots as homes, `capacity="static"`: the mean, whatever the loads

All layers share the slots, their gradients and the row buffers. Counting uses the buffers that the
data plane allocates and the tensors that experts save per row for backward: the row, gate and up,
and the activation. With 16 layers in flight the saved tensors exist 16 times, the rest once. On a
GPU, the peak of forward and backward is measured instead (activations and gradients of the home
experts), and the highest skew is also timed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from bench_layer_gpu import SIZES, TOY
from card import Size, World
from harness import ANY, Bench, Line, Metric, main
from layers import STEP, FixedRouter, layer_with_weights
from load_cases import HotRank, even
from timing import free

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.comm import Region

SKEWS = (1.0, 1.5, 3.0)
AFTER = Metric("rows_of_the_fullest_rank", "rows", "busiest", ".0f")
CAPACITY = Metric("rows_with_room", "rows", "capacity", ".0f")
SLOTS = Metric("slots_and_their_gradients", "MB", "slots MB", ".1f")
ROWS = Metric("shared_rows", "MB", "rows MB", ".1f")
STEP_MEMORY = Metric("peak_of_a_step", "MB", "step MB", ".1f")
KEPT = Metric("kept_for_backward", "MB", "kept MB", ".1f")
EACH = 2  # bytes of a BF16 number
ALL = Metric("all_but_weights", "MB", "all MB", ".1f")
MODEL = Metric("all_but_weights_of_16_layers", "MB", "16 layers", ".0f")
LAYERS = 16
OVER = Metric("share_of_none", "share", "of none", ".3f")


@dataclass(frozen=True)
class Contender:
    """A configuration of the layer."""

    name: str
    policy: str
    slots: int
    capacity: int | str  # of the balancer; 0: what the plan needs


def contenders(size: Size) -> Iterator[Contender]:
    yield Contender("none", "none", 0, 0)
    yield Contender("ultraep, 1 slot", "ultraep", 1, "auto")
    yield Contender("ultraep, planned", "ultraep", 1, 0)
    yield Contender("static", "ultraep", size.experts // size.ranks, "static")


def plan_of(size: Size, skew: float, contender: Contender) -> Plan:
    loads = even(size) if skew == 1 else HotRank(skew).draw(size)
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=contender.slots)
    return ultraep.plan(loads, topology, BalanceConfig(policy=contender.policy))


def shared_bytes(balancer: ultraep.Balancer, device: str) -> tuple[dict[str, int], int]:
    """Mapped bytes of a rank by use, and its row capacity."""
    plane: Any = balancer.plane(device)
    memory = plane.workspaces.last.memory
    nbytes_of: dict[str, int] = defaultdict(int)
    for (kind, nbytes), _ in memory._regions.items():
        nbytes_of["rows" if kind in ("values", "served") else "slots"] += nbytes
    return nbytes_of, memory.capacity


class OneRank:
    """The memory of one rank of a group; pages that are not written are never touched."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, size: int) -> None:
        self.size = size

    def allocate(self, _: str, nbytes: int) -> Region:
        local = torch.empty(nbytes, dtype=torch.uint8)
        return Region(local, torch.full((self.size,), local.data_ptr()), local)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def close(self) -> None:
        """The memory is freed with the last tensor."""


def on_host(size: Size, contender: Contender, capacity: int | str) -> tuple[dict[str, int], int]:
    """Bytes allocated for such a layer, without running it."""
    balancer = ultraep.Balancer(
        peers=OneRank(size.ranks),
        data_plane="mapped",
        experts=size.experts,
        slots=contender.slots,
        policy=contender.policy,
        tokens=size.tokens,
        capacity=capacity,
    )
    homes = size.experts // size.ranks
    weights = {
        "gate_up_proj": torch.empty(homes, 2 * size.ffn, size.hidden, dtype=torch.bfloat16),
        "down_proj": torch.empty(homes, size.hidden, size.ffn, dtype=torch.bfloat16),
    }
    layer = layer_with_weights(balancer, FixedRouter(), weights)
    ids = torch.zeros(size.tokens, size.top_k, dtype=torch.int32)
    row = torch.zeros(1, size.hidden, dtype=torch.bfloat16)
    balancer.prepare(ids, row, layer.experts.bundle)
    nbytes_of, rows = shared_bytes(balancer, "cpu")
    return nbytes_of | {"kept": rows * EACH * (size.hidden + 3 * size.ffn)}, rows


def on_card(
    world: World, plan: Plan, capacity: Any, *, timed: bool
) -> tuple[dict[str, int], int, float | None]:
    """Shared memory, the peak of a step and, with `timed`, its milliseconds."""
    world.regroup(plan, capacity)
    world.route(plan.loads)
    first, *others = world.ranks
    nbytes_of, rows = shared_bytes(first.balancer, "cuda")
    first.capture()  # loads kernels, which are not part of the step
    first.forget()
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    first.capture()
    nbytes_of["step"] = torch.cuda.max_memory_allocated() - before
    if not timed:
        return nbytes_of, rows, None
    for rank in others:
        rank.capture()
    torch.cuda.synchronize()
    world.replay()
    world.check()
    return nbytes_of, rows, world.time()


def lines(size: Size, skew: float, world: World | None, *, timed: bool) -> Iterator[Line]:
    """Lines of all configurations at one skew."""
    whole = 0.0
    for contender in contenders(size):
        plan = plan_of(size, skew, contender)
        busiest = int(plan.rank_loads.max())
        capacity = contender.capacity or busiest
        ms = None
        if world is None:
            nbytes_of, rows = on_host(size, contender, capacity)
        else:
            nbytes_of, rows, ms = on_card(world, plan, capacity, timed=timed)
        total = sum(nbytes_of.values())
        whole, kept = whole or total, nbytes_of.get("kept")
        values = {
            AFTER: busiest,
            CAPACITY: rows,
            SLOTS: nbytes_of["slots"] / 1e6,
            ROWS: nbytes_of["rows"] / 1e6,
            KEPT: None if kept is None else kept / 1e6,
            STEP_MEMORY: nbytes_of["step"] / 1e6 if "step" in nbytes_of else None,
            ALL: total / 1e6,
            OVER: total / whole,
            MODEL: None if kept is None else (total + (LAYERS - 1) * kept) / 1e6,
            STEP: ms,
        }
        yield Line({"skew": skew, "way": contender.name, "slots": contender.slots}, values)


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    size: Size = SIZES[0]
    skews: tuple[float, ...] = SKEWS


def memory(bench: Bench) -> None:
    """Measure all skews, the highest first."""
    size, skews = bench.scale.size, bench.scale.skews
    world = World(size) if bench.on_gpu else None
    about = f"{size.model}: {size.about}"
    about += f", {size.tokens} tokens per rank, EP{size.ranks}; bytes of one rank"
    section = "counted" if world is None else "measured"
    for skew in skews[::-1]:
        table = list(lines(size, skew, world, timed=skew == skews[-1]))
        bench.table(about, table, section=section)
    if world is None:
        bench.report.note("No GPU: buffers are counted, nothing runs.")


if __name__ == "__main__":
    toy = Scale(TOY, (1.0, 1.2))
    scales = {"toy": toy, "quick": Scale(skews=SKEWS[-1:]), "full": Scale()}
    main("memory", __doc__, {"": memory}, scales, needs=ANY)
