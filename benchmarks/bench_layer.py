"""A whole MoE layer in real processes, forward and backward: unbalanced, balanced, forced balanced.

    python benchmarks/bench_layer.py           # EP2, one pinned core and one thread per rank
    python benchmarks/bench_layer.py --toy     # tiny, for CI

`gain`: the same tokens, routed with a skew, under each policy; and as a ceiling the same number of
tokens routed evenly. The variants take turns in one process group. `stages`: where the time of a
step goes on the busiest rank. `control`: what planning, rerouting and bookkeeping take on one core,
with the messages of the other ranks at hand.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Line, Metric, Report, common_options
from load_cases import Shape, even_ids, skewed_ids
from world import Given, on_ranks

import ultraep
from ultraep.comm import Communicator
from ultraep.hops import hops
from ultraep.microbatch import Layer
from ultraep.runtime.connect import connect
from ultraep.tools.report.rows import cpu_device

SECTIONS = ("gain", "stages", "control")
FORCED = "forced balance"
STEP = Metric("step_time_p50", "ms", "ms", ".2f")
RATE = Metric("tokens_per_second", "tokens/s", "tokens/s", ".0f")
SHARE = Metric("share_of_forced_balance", "share", "of forced", ".3f")
GAIN = Metric("gain_over_none", "ratio", "over none", ".3f")
BEFORE = Metric("imbalance_before", "max/mean", "before", ".3f")
AFTER = Metric("imbalance_after", "max/mean", "after", ".3f")
COPIES = Metric("copies", "copies", "copies", ".1f")
MOVED = Metric("bytes_moved", "MB", "MB moved", ".2f")
STAGE = Metric("stage_time", "ms", "ms", ".3f")


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """What is measured."""

    ranks: int = 2
    tokens: int = 2048
    hidden: int = 512
    ffn: int = 1024
    experts: int = 8
    top_k: int = 2
    ratio: float = 1.6
    slots: int = 1
    rounds: int = 31
    transport: str = "auto"


Width = tuple[int, int, int]  # experts, top_k, tokens of a rank
OPTIONS = {
    "ranks": "processes (default 2)",
    "tokens": "of a rank",
    "hidden": "model width",
    "ffn": "hidden width of an expert",
    "ratio": "fullest rank over mean rank",
    "transport": "auto, shared or sockets",
}
CONTROL_PASSES = 5  # the quickest counts, as others may use the machine
CONTROL: tuple[Width, ...] = ((64, 8, 1024), (64, 8, 8192), (256, 8, 8192))


class Watched:
    """A communicator that measures how long each verb takes, waiting for others included."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.seconds: dict[str, float] = defaultdict(float)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if name not in ("all_gather", "all_to_all", "exchange"):
            return found

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = found(*args)
            self.seconds[name] += time.perf_counter() - begin
            return result

        return timed


def on_rank(rank: int, size: Size) -> dict[str, dict[str, Any]]:
    """One process: time all variants in turns."""
    with closing(Watched(connect(dist.group.WORLD, transport=size.transport))) as watched:
        return measure(rank, size, watched)


def measure(rank: int, size: Size, comm: Watched) -> dict[str, dict[str, Any]]:
    """Step times and stage times of every variant, the slowest rank's."""
    config = ultraep.BalanceConfig(objective="balance")  # bench_cost.py asks what pays
    options: dict[str, Any] = {"experts": size.experts, "slots": size.slots, "config": config}
    balancer = ultraep.Balancer(communicator=comm, **options)
    moe = ultraep.BalancedMoE.swiglu(
        size.hidden, size.ffn, size.experts, size.top_k, balancer=balancer
    )
    moe.router = router = Given()
    skewed, even = skewed_ids(size, size.ratio), even_ids(size)
    variants = {"none": (skewed, "none"), "ultraep": (skewed, "ultraep"), FORCED: (even, "none")}
    tokens = torch.randn(size.tokens, size.hidden, generator=torch.Generator().manual_seed(rank))
    steps: dict[str, list[float]] = {name: [] for name in variants}
    facts: dict[str, dict[str, Any]] = {}
    for turn in range(size.rounds + 2):  # two to warm up
        for name, (ids, policy) in variants.items():
            router.ids = ids[rank]
            router.gates = torch.full(ids[rank].shape, 1 / size.top_k, requires_grad=True)
            balancer.reset_stats()
            comm.seconds.clear()
            elapsed = one_step(moe, tokens, policy)
            slowest = comm.all_gather(torch.tensor([elapsed])).max().item()
            if turn >= 2:
                steps[name].append(slowest)
            facts[name] = stage_facts(balancer, comm, elapsed)
    return {name: facts[name] | {"step": median(steps[name])} for name in variants}


def one_step(moe: ultraep.BalancedMoE, tokens: torch.Tensor, policy: str) -> float:
    """Seconds of forward and backward, from a common start."""
    x = tokens.clone().requires_grad_()
    moe.zero_grad(set_to_none=True)
    moe.balancer.comm.all_gather(torch.zeros(1))
    begin = time.perf_counter()
    moe(x, policy=policy).sum().backward()
    return time.perf_counter() - begin


def stage_facts(balancer: ultraep.Balancer, comm: Watched, elapsed: float) -> dict[str, Any]:
    """What one rank did in one step; sums over the group where it moved something."""
    stats = balancer.stats()
    moved = float(stats["weights_bytes_sent"] + stats["gradients_bytes_sent"])
    seconds = dict(stats["seconds"])
    control = sum(seconds.get(stage, 0.0) for stage in ("plan", "reroute"))
    waited = comm.seconds["all_gather"] + comm.seconds["all_to_all"] + comm.seconds["exchange"]
    mine = {
        "loads and checks (all_gather)": comm.seconds["all_gather"],
        "plan": seconds.get("plan", 0.0),
        "reroute": seconds.get("reroute", 0.0),
        "weights and gradients of copies (exchange)": comm.seconds["exchange"],
        "dispatch and combine (all_to_all)": comm.seconds["all_to_all"],
        "experts and the rest": elapsed - control - waited,
    }
    together = comm.all_gather(torch.tensor([moved, *mine.values()], dtype=torch.float64))
    busiest = int(together[:, -1].argmax())
    return {
        "before": stats["imbalance_before"],
        "after": stats["imbalance_after"],
        "copies": stats["copies"],
        "moved": together[:, 0].sum().item(),
        "stages": dict(zip(mine, together[busiest, 1:].tolist(), strict=True)),
    }


def report_gain(report: Report, size: Size, found: dict[str, dict[str, Any]]) -> None:
    case = {"ranks": size.ranks, "tokens": size.tokens, "hidden": size.hidden, "ffn": size.ffn}
    case |= {"experts": size.experts, "top_k": size.top_k, "slots": size.slots}
    lines = []
    for name, facts in found.items():
        values = {
            STEP: facts["step"] * 1e3,
            RATE: size.ranks * size.tokens / facts["step"],
            SHARE: found[FORCED]["step"] / facts["step"],
            GAIN: found["none"]["step"] / facts["step"],
            BEFORE: facts["before"],
            AFTER: facts["after"],
            COPIES: float(facts["copies"]),
            MOVED: facts["moved"] / 1e6,
        }
        lines.append(Line(case | {"policy": name}, values))
    report.section = "gain"
    report.add("a layer, forward and backward", lines)


def report_stages(report: Report, found: dict[str, dict[str, Any]]) -> None:
    report.section = "stages"
    for name, facts in found.items():
        lines = [
            Line({"policy": name, "stage": stage}, {STAGE: seconds * 1e3})
            for stage, seconds in facts["stages"].items()
        ]
        report.add("the busiest rank's last step", lines)
    report.note("Messages include waiting for slower ranks. Weights travel in forward; in backward")
    report.note("only if another layer used the slots since. MB moved: by all ranks, both ways.")


class Others:
    """A group of which only this rank runs; what the others would say is known beforehand."""

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


def report_control(report: Report, rounds: int, ranks: int, sizes: Sequence[Width]) -> None:
    """Planning, rerouting and bookkeeping of one rank among `ranks`, on one core."""
    lines = []
    for experts, top_k, tokens in sizes:
        wide = Size(ranks=ranks, tokens=tokens, experts=experts, top_k=top_k)
        ids, others = skewed_ids(wide, wide.ratio), Others(ranks)
        others.loads = torch.stack([torch.bincount(i.reshape(-1), minlength=experts) for i in ids])
        balancer = ultraep.Balancer(experts=experts, communicator=others)  # type: ignore[arg-type]
        passes = [control_pass(balancer, ids[0], rounds) for _ in range(CONTROL_PASSES)]
        stages = min(passes, key=lambda stages: sum(stages.values()))
        case = {"ranks": ranks, "experts": experts, "top_k": top_k, "tokens": tokens}
        for stage, value in (stages | {"all": sum(stages.values())}).items():
            lines.append(Line(case | {"stage": stage}, {STAGE: value * 1e3}))
    report.section = "control"
    report.add("control of one layer, messages excluded", lines)


def control_pass(balancer: ultraep.Balancer, ids: torch.Tensor, rounds: int) -> dict[str, float]:
    """Medians over some rounds, the first ones left out."""
    seconds = [control_seconds(balancer, ids) for _ in range(rounds + 3)][3:]
    return {stage: median(s[stage] for s in seconds) for stage in seconds[0]}


def control_seconds(balancer: ultraep.Balancer, ids: torch.Tensor) -> dict[str, float]:
    """Seconds of every step between the router and dispatch."""
    marks = [time.perf_counter()]
    microbatch = balancer.begin(Layer(), ids)
    microbatch.count()
    marks.append(time.perf_counter())
    plan = microbatch.plan().to_host()
    marks.append(time.perf_counter())
    microbatch.reroute()  # with all that dispatch needs
    marks.append(time.perf_counter())
    hops(plan, balancer.settings.relay, chunks=balancer.settings.chunks)
    marks.append(time.perf_counter())
    names = ("count", "plan and check", "reroute", "transfers")
    return {n: b - a for n, a, b in zip(names, marks, marks[1:], strict=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    common_options(parser)
    for name, text in OPTIONS.items():
        known = getattr(Size, name)
        parser.add_argument(f"--{name}", type=type(known), default=known, help=text)
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in OPTIONS}
    size = Size(experts=4 * options.ranks, **given)
    if options.toy:
        size = Size(ranks=2, tokens=64, hidden=16, ffn=32, rounds=2, transport=options.transport)
    report = Report("layer", sys.argv, device=cpu_device())
    report.header()
    found = on_ranks(size.ranks, on_rank, size)
    report_gain(report, size, found)
    report_stages(report, found)
    torch.set_num_threads(1)
    report_control(report, size.rounds, 8, ((64, 8, 64),) if options.toy else CONTROL)
    report.write(options.json)


if __name__ == "__main__":
    main()
