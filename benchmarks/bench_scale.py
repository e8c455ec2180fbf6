"""How do start-up, memory and messages grow with the number of ranks?

    python benchmarks/bench_scale.py            # up to 64 gloo ranks on this machine
    python benchmarks/bench_scale.py --toy      # tiny, for CI

The script starts processes with a tiny layer, forked from one that has imported torch.
A rank counts what it adds to that process: private memory, sockets, threads, and the gathers of its
set-up. All ranks share the cores, so only counts and bytes scale as on a cluster.

`growth` is the exponent from the first to the last size: 1 is proportional to the ranks, 2 to their
square. `must` is the exponent that cannot be avoided; the notes below a table say why. The script
fails if a number that does not depend on the speed of the machine grows faster.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import Bench, Line, Metric, Mismatch, main
from layers import on_ranks

from ultraep import BalanceConfig, BalancedMoE, Balancer
from ultraep.backends import select
from ultraep.runtime.torch_dist import TorchDistCommunicator

# In the fork server, so that ranks share the planner with it, and the pages of Python objects,
# which a collection of garbage would copy.
select()
gc.freeze()

HIDDEN, FFN, TOKENS, TOP_K, HOMES = 16, 16, 8, 2, 2
MEMORY_OF_RANK = 150 << 20  # bytes that must be free for each rank
STEPS = 3
NOISE = 0.35  # of a growth that was measured
GROWTH = Metric("growth", "exponent", "growth", "+.2f")
MUST = Metric("must", "exponent", "must", ".0f")


@dataclass(frozen=True)
class Quantity:
    """A measured number, its unit, the growth it must have, and why.

    counted: the number does not depend on the speed of the machine.
    """

    name: str
    unit: str
    must: int
    why: str
    counted: bool = True


QUANTITIES = {
    "start": Quantity("start of processes and group", "s", 2, "all pairs connect", counted=False),
    "balancer": Quantity("start of the balancer", "s", 2, "all ranks gather", counted=False),
    "step": Quantity("step", "ms", 2, "all ranks share the cores", counted=False),
    "sockets": Quantity("sockets of the group", "", 1, "gloo connects all pairs"),
    "own sockets": Quantity("sockets of the balancer", "", 0, "it uses those of the group"),
    "threads": Quantity("threads of the balancer", "", 0, "one thread answers other ranks"),
    "gathers": Quantity("gathers at start", "", 0, "each compares one thing"),
    "received": Quantity("bytes gathered at start", "KB", 1, "a record of every rank"),
    "private": Quantity("private memory of the balancer and a step", "MB", 1, "loads of all ranks"),
}


SCALES = {"toy": (2, 4), "quick": (4, 16), "full": (8, 16, 32, 64)}  # numbers of ranks


def ranks(bench: Bench) -> None:
    """Start ever more ranks."""
    needed = max(bench.scale) * MEMORY_OF_RANK
    if free_memory() < needed:
        raise Mismatch(f"{max(bench.scale)} ranks need {needed >> 20} MB of free memory")
    on_ranks(2, rank_of, time.time())  # starts the fork server
    measured = [on_ranks(size, rank_of, time.time()) for size in bench.scale]
    show(bench, measured)


def rank_of(_rank: int, started: float) -> dict[str, float]:
    """Measure one rank; return the means over all ranks, and the maximum of times."""
    numbers = {"start": time.time() - started}
    private, sockets, threads = private_memory(), count_sockets(), count_threads()
    gathers: list[int] = []
    gather = TorchDistCommunicator._gather

    def counted(self: Any, verb: str, tensor: torch.Tensor) -> torch.Tensor:
        gathers.append(self.size * tensor.nbytes)
        return gather(self, verb, tensor)

    TorchDistCommunicator._gather = counted  # type: ignore[method-assign]
    begin = time.perf_counter()
    experts, size = HOMES * dist.get_world_size(), dist.get_world_size()
    balancer = Balancer(experts=experts, config=BalanceConfig(objective="balance"))
    numbers["balancer"] = time.perf_counter() - begin
    numbers |= {"gathers": len(gathers), "received": sum(gathers) / 1e3}
    numbers |= {"sockets": sockets, "own sockets": count_sockets() - sockets}
    numbers["threads"] = count_threads() - threads
    layer = BalancedMoE.swiglu(HIDDEN, FFN, experts, TOP_K, balancer=balancer)
    numbers["step"] = statistics.median(step_of(layer) for _ in range(STEPS)) * 1e3
    numbers["private"] = (private_memory() - private) / 1e6
    dist.barrier()
    balancer.close()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, numbers)
    return {
        name: (max if name in ("start", "balancer", "step") else statistics.fmean)(
            [other[name] for other in gathered]
        )
        for name in numbers
    }


def step_of(layer: BalancedMoE) -> float:
    begin = time.perf_counter()
    x = torch.ones(TOKENS, HIDDEN, requires_grad=True)
    layer(x).sum().backward()
    return time.perf_counter() - begin


def private_memory() -> int:
    """Bytes of the private pages of this process."""
    sizes = sizes_in("/proc/self/smaps_rollup")
    return sizes["Private_Clean"] + sizes["Private_Dirty"]


def sizes_in(path: str) -> dict[str, int]:
    """Return the bytes by name in a file of the kernel."""
    with open(path, encoding="ascii") as file:
        words = [line.split() for line in file]
    return {name.rstrip(":"): int(size[0]) * 1024 for name, *size in words if size[1:] == ["kB"]}


def free_memory() -> int:
    """Bytes that processes can still allocate."""
    return sizes_in("/proc/meminfo")["MemAvailable"]


def count_sockets() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def show(bench: Bench, measured: Sequence[dict[str, float]]) -> None:
    """Print one line per quantity; raise if a counted one grows faster than it must."""
    lines, faster, sizes = [], [], bench.scale
    for name, quantity in QUANTITIES.items():
        case = {"quantity": f"{quantity.name}{quantity.unit and ', '}{quantity.unit}"}
        values: dict[Metric, float | None] = {
            Metric(f"at_{size}_ranks", "as named", str(size), ".3f"): numbers[name]
            for size, numbers in zip(sizes, measured, strict=True)
        }
        growth = growth_of(sizes, [numbers[name] for numbers in measured])
        lines.append(Line(case, values | {GROWTH: growth, MUST: quantity.must}))
        if quantity.counted and growth is not None and growth > quantity.must + NOISE:
            faster.append(f"{quantity.name}: {growth:.2f}, must {quantity.must}")
    bench.table("ranks", lines)
    for quantity in QUANTITIES.values():
        bench.report.note(f"{quantity.name}: must {quantity.must}, {quantity.why}")
    if faster and not bench.options.toy:
        raise Mismatch(f"grows faster than it must: {'; '.join(faster)}")


def growth_of(sizes: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the exponent of the growth from the first to the last size; None from zero."""
    if values[0] <= 0 or values[-1] <= 0:
        return None
    return math.log(values[-1] / values[0]) / math.log(sizes[-1] / sizes[0])


if __name__ == "__main__":
    main("scale", __doc__, {"ranks": ranks}, SCALES)
