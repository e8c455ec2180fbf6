"""A whole MoE layer in processes, forward and backward: unbalanced, balanced, evenly routed.

    python benchmarks/bench_layer.py           # EP2, one pinned core and one thread per rank
    python benchmarks/bench_layer.py --toy     # tiny, for CI

`gain` runs the same skewed routing with each policy and, as a ceiling, even routing of the same
number of tokens. The variants alternate in one process group. `control` measures planning,
rerouting and bookkeeping on one core, without waiting for messages.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Bench, Line, Metric, main
from layers import AFTER, BEFORE, COPIES, FORCED, SHARE, STAGE, FixedRouter, on_ranks, step_values
from load_cases import Shape, even_ids, skewed_ids
from timing import Call, in_turns, nothing

import ultraep
from ultraep.hops import CHUNKS, hops
from ultraep.microbatch import Layer
from ultraep.runtime.connect import connect

MOVED = Metric("bytes_moved", "MB", "MB moved", ".2f")


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer and what is measured with it."""

    ranks: int = 2
    tokens: int = 2048
    hidden: int = 512
    ffn: int = 1024
    experts: int = 8
    top_k: int = 2
    ratio: float = 1.6
    slots: int = 1
    rounds: int = 31
    control_rounds: int = 31
    control_ranks: int = 8
    control: tuple[Width, ...] = ((64, 8, 1024), (64, 8, 8192), (256, 8, 8192))

    @property
    def case(self) -> dict[str, str | int | float]:
        names = ("ranks", "tokens", "hidden", "ffn", "experts", "top_k", "slots")
        return {name: getattr(self, name) for name in names}


Width = tuple[int, int, int]  # experts, top_k, tokens per rank
CONTROL_PASSES = 5  # the fastest one counts, because other programs may use the machine


def on_rank(rank: int, size: Size) -> dict[str, dict[str, float]]:
    """One process: step times of the slowest rank and facts about the plan, by variant."""
    comm = connect(dist.group.WORLD)
    config = ultraep.BalanceConfig(objective="balance")  # bench_cost.py measures the default
    options: dict[str, Any] = {"experts": size.experts, "slots": size.slots, "config": config}
    balancer = ultraep.Balancer._with_settings(comm, **options)
    moe = ultraep.BalancedMoE.swiglu(
        size.hidden, size.ffn, size.experts, size.top_k, balancer=balancer
    )
    moe.router = router = FixedRouter()
    skewed, even = skewed_ids(size, size.ratio), even_ids(size)
    variants = {"none": (skewed, "none"), "ultraep": (skewed, "ultraep"), FORCED: (even, "none")}
    tokens = torch.randn(size.tokens, size.hidden, generator=torch.Generator().manual_seed(rank))
    facts: dict[str, dict[str, float]] = {}

    def seconds(name: str) -> float:
        ids, policy = variants[name]
        router.ids = ids[rank]
        router.gates = torch.full(ids[rank].shape, 1 / size.top_k, requires_grad=True)
        balancer.reset_stats()
        elapsed = one_step(moe, tokens, policy)
        stats = balancer.stats()
        sent = torch.tensor([stats["weights_bytes_sent"] + stats["gradients_bytes_sent"]])
        facts[name] = {
            "before": stats["imbalance_before"],
            "after": stats["imbalance_after"],
            "copies": stats["copies"],
            "moved": comm.all_gather(sent.double()).sum().item(),
        }
        return elapsed

    steps = in_turns(list(variants), size.rounds, seconds)
    comm.close()
    return {name: facts[name] | {"step": median(steps[name])} for name in variants}


def one_step(
    moe: ultraep.BalancedMoE, tokens: torch.Tensor, policy: str, after: Call = nothing
) -> float:
    """Seconds of forward, backward and `after` from a common start, of the slowest rank."""
    x = tokens.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    moe.balancer.comm.all_gather(torch.zeros(1))
    begin = time.perf_counter()
    moe(x, policy=policy).sum().backward()
    after()
    elapsed = torch.tensor([time.perf_counter() - begin])
    return float(moe.balancer.comm.all_gather(elapsed).max())


def gain(bench: Bench) -> None:
    """Time the layer with every policy."""
    size: Size = replace(bench.scale, experts=4 * bench.scale.ranks)
    results = on_ranks(size.ranks, on_rank, size)
    lines = []
    for name, facts in results.items():
        values = {
            **step_values(size, facts["step"] * 1e3, results["none"]["step"] * 1e3),
            SHARE: results[FORCED]["step"] / facts["step"],
            BEFORE: facts["before"],
            AFTER: facts["after"],
            COPIES: facts["copies"],
            MOVED: facts["moved"] / 1e6,
        }
        lines.append(Line(size.case | {"policy": name}, values))
    bench.table("a layer, forward and backward", lines)
    bench.report.note("Weights travel in forward; in backward only if another layer used the slots")
    bench.report.note("since. MB moved: by all ranks, both ways.")


class PreparedCommunicator:
    """A communicator of a group in which only this rank runs; other messages are prepared."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.loads = torch.empty(0)

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        table = tensor.expand(self.size, -1).clone()
        if tensor.numel() > self.loads.shape[-1]:
            table[:, -self.loads.shape[-1] :] = self.loads
        return table

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] * self.size


def control(bench: Bench) -> None:
    """Time planning, rerouting and bookkeeping of one rank on one core."""
    torch.set_num_threads(1)
    lines, ranks, rounds = [], bench.scale.control_ranks, bench.scale.control_rounds
    for experts, top_k, tokens in bench.scale.control:
        wide = Size(ranks=ranks, tokens=tokens, experts=experts, top_k=top_k)
        ids, comm = skewed_ids(wide, wide.ratio), PreparedCommunicator(ranks)
        comm.loads = torch.stack([torch.bincount(i.reshape(-1), minlength=experts) for i in ids])
        balancer = ultraep.Balancer(comm, experts=experts)  # type: ignore[arg-type]
        passes = [control_pass(balancer, ids[0], rounds) for _ in range(CONTROL_PASSES)]
        stages = min(passes, key=lambda stages: sum(stages.values()))
        case = {"ranks": ranks, "experts": experts, "top_k": top_k, "tokens": tokens}
        for stage, value in (stages | {"all": sum(stages.values())}).items():
            lines.append(Line(case | {"stage": stage}, {STAGE: value * 1e3}))
    bench.table("control of one layer, without messages", lines)


def control_pass(balancer: ultraep.Balancer, ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """Medians over the rounds, without the first ones."""
    seconds = [control_seconds(balancer, ids) for _ in range(rounds + 3)][3:]
    return {stage: median(s[stage] for s in seconds) for stage in seconds[0]}


def control_seconds(balancer: ultraep.Balancer, ids: torch.Tensor) -> dict[str, float]:
    """Seconds of every operation between the router and dispatch."""
    marks = [time.perf_counter()]
    microbatch = balancer.begin(Layer(), ids)
    microbatch.count()
    marks.append(time.perf_counter())
    plan = microbatch.plan().to_host()
    marks.append(time.perf_counter())
    microbatch.reroute()  # computes everything that dispatch needs
    marks.append(time.perf_counter())
    hops(plan, balancer.settings.relay, chunks=CHUNKS)
    marks.append(time.perf_counter())
    names = ("count", "plan and check", "reroute", "transfers")
    return {n: b - a for n, a, b in zip(names, marks, marks[1:], strict=False)}


TOY = Size(
    tokens=64,
    hidden=16,
    ffn=32,
    rounds=2,
    control_rounds=2,
    control_ranks=4,
    control=((16, 2, 64),),
)
SCALES = {"toy": TOY, "quick": replace(Size(), rounds=11), "full": Size()}


if __name__ == "__main__":
    main("layer", __doc__, {"gain": gain, "control": control}, SCALES)
