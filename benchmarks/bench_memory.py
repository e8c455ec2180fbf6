"""Memory of a layer per rank: unbalanced, balanced, and with a static row capacity.

    python benchmarks/bench_memory.py            # measured on a GPU (CUDA MPS), else counted
    python benchmarks/bench_memory.py --toy      # tiny, for CI

All ranks have buffers of the same size. Bytes of one rank, without its weights:

    none              every row goes to its home: capacity for the rows of the busiest rank
    ultraep, 1 slot   `capacity="auto"`: twice the rows of a rank
    ultraep, planned  the same with the capacity that the plan of these loads needs
    static            as many slots as homes, `capacity="static"`: the mean, whatever the loads

All layers share the slots, their gradients and the row buffers. Counting uses the buffers that the
data plane allocates and the tensors that experts save per row for backward: the row, gate and up,
and the activation. With 16 layers in flight the saved tensors exist 16 times, the rest once. On a
GPU, eight processes measure the peak of forward and backward instead (activations and gradients of
the home experts) and time the step.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Line, Metric, options_parser
from layers import STEP, FixedRouter, drawn_weights, layer_with_weights, on_ranks, slowest
from load_cases import HotRank, Shape, even, ids_with
from mps import device_of_rank, report_of_ranks
from timing import free, on_gpu

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep.arrays import IntArray
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
STEPS = 7  # timed

QWEN = Shape(hidden=4096, ffn=1536, experts=128, top_k=8, tokens=8192, ranks=8)
TOY = Shape(hidden=256, ffn=128, experts=16, top_k=2, tokens=64, ranks=2)


@dataclass(frozen=True)
class Contender:
    """A configuration of the layer."""

    name: str
    policy: str
    slots: int
    capacity: int | str  # of the balancer; 0: what the plan needs


def contenders(size: Shape) -> Iterator[Contender]:
    yield Contender("none", "none", 0, 0)
    yield Contender("ultraep, 1 slot", "ultraep", 1, "auto")
    yield Contender("ultraep, planned", "ultraep", 1, 0)
    yield Contender("static", "ultraep", size.experts // size.ranks, "static")


def loads_of_skew(size: Shape, skew: float) -> IntArray:
    return even(size) if skew == 1 else HotRank(skew).draw(size)


def plan_of(size: Shape, skew: float, contender: Contender) -> Plan:
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=contender.slots)
    return ultraep.plan(loads_of_skew(size, skew), topology, BalanceConfig(policy=contender.policy))


def shared_bytes(balancer: ultraep.Balancer, device: str) -> tuple[dict[str, int], int]:
    """Mapped bytes of a rank by use, and its row capacity."""
    plane: Any = balancer.plane(device)
    memory = plane.workspaces.last.memory
    nbytes_of: dict[str, int] = defaultdict(int)
    for (kind, nbytes), _ in memory._regions.items():
        nbytes_of["rows" if kind in ("values", "served") else "slots"] += nbytes
    return nbytes_of, memory.capacity


class OneRank:
    """One rank of a group that only allocates; pages that are not written are never touched."""

    rank, device, timeout = 0, torch.device("cpu"), 30.0

    def __init__(self, size: int) -> None:
        self.size = size

    def allocate(self, _: str, nbytes: int) -> Region:
        local = torch.empty(nbytes, dtype=torch.uint8)
        return Region(local, torch.full((self.size,), local.data_ptr()), local)

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size

    def hosts(self) -> OneRank:
        return self

    def close(self) -> None:
        """The memory is freed with the last tensor."""


def on_host(size: Shape, contender: Contender, capacity: int | str) -> tuple[dict[str, int], int]:
    """Bytes allocated for such a layer, without running it."""
    alone: Any = OneRank(size.ranks)
    balancer = ultraep.Balancer._with_settings(
        alone,
        peers=alone,
        data_plane="mapped",
        experts=size.experts,
        slots=contender.slots,
        config=BalanceConfig(policy=contender.policy, objective="balance"),
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
    rank: int, size: Shape, skew: float, contender: Contender, capacity: int | str
) -> tuple[dict[str, int], int, float]:
    """Shared memory, the peak of a step, and its milliseconds, in one process."""
    device = device_of_rank(cuda=True)
    balancer = ultraep.Balancer._with_settings(
        dist.group.WORLD,
        data_plane="mapped",
        experts=size.experts,
        slots=contender.slots,
        config=BalanceConfig(policy=contender.policy, objective="balance"),
        capacity=capacity,
        timeout=120.0,
    )
    homes = balancer.topology.home_experts(rank).tolist()
    weights = drawn_weights(size, homes, device, torch.bfloat16)
    ids = ids_with(loads_of_skew(size, skew)[rank], size, seed=rank).to(device)
    gates = torch.full(ids.shape, 1 / size.top_k, device=device, requires_grad=True)
    layer = layer_with_weights(balancer, FixedRouter(ids, gates), weights)
    x = torch.randn(size.tokens, size.hidden, device=device, dtype=torch.bfloat16)
    x.requires_grad_()

    def step() -> None:
        for tensor in (x, gates, *layer.parameters()):
            tensor.grad = None
        layer(x).sum().backward()

    step()  # loads kernels and allocates what all steps share
    nbytes_of, rows = shared_bytes(balancer, "cuda")
    for tensor in (x, gates, *layer.parameters()):
        tensor.grad = None
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    nbytes_of["step"] = torch.cuda.max_memory_allocated() - before
    seconds = median(slowest(step, 1, device)[0] for _ in range(STEPS))
    balancer.close()
    return dict(nbytes_of), rows, 1e3 * seconds


def lines(size: Shape, skew: float, *, cuda: bool) -> Iterator[Line]:
    """Lines of all configurations at one skew."""
    whole = 0.0
    for contender in contenders(size):
        busiest = int(plan_of(size, skew, contender).rank_loads.max())
        capacity, ms = contender.capacity or busiest, None
        if cuda:
            nbytes_of, rows, ms = on_ranks(size.ranks, on_card, size, skew, contender, capacity)
        else:
            nbytes_of, rows = on_host(size, contender, capacity)
        total = sum(nbytes_of.values())
        whole, kept = whole or total, nbytes_of.get("kept")
        values = {
            AFTER: busiest,
            CAPACITY: rows,
            SLOTS: nbytes_of["slots"] / 1e6,
            ROWS: nbytes_of["rows"] / 1e6,
            KEPT: None if kept is None else kept / 1e6,
            STEP_MEMORY: nbytes_of["step"] / 1e6 if cuda else None,
            ALL: total / 1e6,
            OVER: total / whole,
            MODEL: None if kept is None else (total + (LAYERS - 1) * kept) / 1e6,
            STEP: ms,
        }
        yield Line({"skew": skew, "way": contender.name, "slots": contender.slots}, values)


def main(argv: Sequence[str]) -> None:
    options = options_parser(__doc__).parse_args(argv[1:])
    cuda = on_gpu(toy=options.toy) and not options.toy
    size = TOY if options.toy else QWEN
    skews = (1.0, 1.2) if options.toy else SKEWS[-1:] if options.quick else SKEWS
    with report_of_ranks("memory", argv, size.ranks, cuda=cuda) as report:
        report.section = "measured" if cuda else "counted"
        about = f"{size.about}, {size.tokens} tokens per rank, EP{size.ranks}; bytes of one rank"
        for skew in skews[::-1]:
            report.add(about, list(lines(size, skew, cuda=cuda)))
            report.write(options.json)
        if not cuda:
            report.note("No GPU: buffers are counted, nothing runs.")


if __name__ == "__main__":
    main(sys.argv)
