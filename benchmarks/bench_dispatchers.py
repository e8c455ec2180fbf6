"""Steps of a layer whose rows another library moves, beside the rows of our own data planes.

    python benchmarks/bench_dispatchers.py            # a GPU, CUDA MPS and DeepEP (`deep_ep`)
    python benchmarks/bench_dispatchers.py --ranks 8
    python benchmarks/bench_dispatchers.py --toy      # the data plane on two CPU ranks, for CI

Every process is a rank (`mps.py`) with a number of tokens of its own; one rank has none. All
variants have the same weights and routes: their outputs and gradients are compared with those of
the data plane before they are timed. Libraries build in minutes: docs/dispatchers.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from harness import Line, Metric, comma_list, installed, options_parser
from layers import (
    AFTER,
    BEFORE,
    STEP,
    FixedRouter,
    check_variants,
    drawn_weights,
    layer_with_weights,
    on_ranks,
    slowest,
)
from load_cases import Shape, draw, hot, ids_with
from mps import ThroughHost, device_of_rank, phase, report_of_ranks
from timing import in_turns

import ultraep
from ultraep.runtime.connect import connect

OWN, LIBRARIES = "data plane", ("DeepEPBuffer", "HybridEP")
# For kernels of the library. Those of all ranks must run at once on the shared GPU, so they get at
# most a quarter of the share of their process; with half of it, kernels of DeepEP wait forever.
MULTIPROCESSORS = {2: 8, 4: 8, 8: 4}
IMBALANCES, ROUNDS = (1.0, 1.8), 9  # of two ranks, less than 2
LIMIT = 60.0  # seconds of a case
OF_OWN = Metric("step_time_over_own", "ratio", "of own", ".3f")
SIZE = Shape(hidden=2048, ffn=768, experts=64, top_k=8, tokens=4096, ranks=4)
Case: TypeAlias = tuple[str, str | None, float]  # data plane, format of experts, imbalance
TOY = Shape(hidden=32, ffn=16, experts=8, top_k=2, tokens=32, ranks=2)


@cache  # one buffer of a library serves all balancers of a process
def dispatcher_of(name: str, size: Shape) -> Any:
    """Return a dispatcher with a buffer of its library; None: rows stay with the data plane."""
    if name == OWN:
        return None
    import deep_ep

    if name == "DeepEPBuffer":
        from ultraep.dispatchers.deepep import DeepEPBuffer

        deep_ep.Buffer.set_num_sms(MULTIPROCESSORS[size.ranks])
        return DeepEPBuffer(deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=1 << 30))
    from ultraep.dispatchers.hybridep import HybridEP

    kernels = {f"num_sms_{api}_api": MULTIPROCESSORS[size.ranks] for api in ("dispatch", "combine")}
    buffer = deep_ep.HybridEPBuffer(
        dist.group.WORLD,
        hidden_dim=size.hidden,
        max_num_of_tokens_per_rank=size.tokens,
        num_local_experts=size.experts // size.ranks + 1,
        **kernels,
    )
    return HybridEP(buffer, tokens=size.tokens)


class Variant:
    """A layer of one rank with a dispatcher."""

    def __init__(self, name: str, size: Shape, plane: str, parts: Any) -> None:
        weights, router, self.x, quantised = parts
        group: Any = dist.group.WORLD
        if plane == "messages" and self.x.is_cuda:
            group = ThroughHost(connect(group, timeout=120.0))
        self.balancer = ultraep.Balancer._with_settings(
            group,
            experts=size.experts,
            data_plane=plane,
            timeout=120.0,
            dispatcher=dispatcher_of(name, size),
            config=ultraep.BalanceConfig(objective="balance"),
        )
        self.layer = layer_with_weights(self.balancer, router, weights, quantised)
        self.leaves = (self.x, *weights.values())

    def step(self) -> torch.Tensor:
        for leaf in self.leaves:
            leaf.grad = None
        y: torch.Tensor = self.layer(self.x)
        y.backward(torch.ones_like(y))
        return y


def on_rank(
    rank: int, size: Shape, names: Sequence[str], cases: Sequence[Case]
) -> list[dict[str, Any]]:
    """One process, for all cases; if a library hangs, print all stacks and end it."""
    results = []
    for case in cases:
        what = " ".join(map(str, case)) if rank == 0 else ""
        with phase(what, LIMIT, time.time() + LIMIT):
            results.append(measured_on(rank, size, names, *case))
    return results


def measured_on(
    rank: int, size: Shape, names: Sequence[str], plane: str, quantised: str | None, ratio: float
) -> dict[str, Any]:
    """Return milliseconds of a step by variant, and the imbalances."""
    device = device_of_rank(cuda=torch.cuda.is_available())
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = size.tokens * (rank + 1) // size.ranks if rank else 0
    ids = ids_with(draw(hot(ratio), size)[rank], size, rank)[:tokens].to(device)
    gates = torch.full(ids.shape, 1 / size.top_k, device=device, requires_grad=True)
    per_rank = size.experts // size.ranks
    homes = [*range(rank * per_rank, (rank + 1) * per_rank)]
    drawn = drawn_weights(size, homes, device, dtype)
    weights = {name: torch.nn.Parameter(weight) for name, weight in drawn.items()}
    x = torch.randn(tokens, size.hidden, device=device, dtype=dtype).requires_grad_()
    parts = weights, FixedRouter(ids, gates), x, quantised
    variants = {name: Variant(name, size, plane, parts) for name in names}
    if tokens:
        check_variants(names, lambda name: variants[name].step(), x, weights)
    else:  # nothing to compare, but the other ranks need this one
        for name in names:
            variants[name].step()
    measure = lambda name: slowest(variants[name].step, 1, device)[0]  # noqa: E731
    seconds = in_turns(list(names), ROUNDS, measure, warmup=2)
    plan: Any = variants[OWN].layer.last_plan
    plan = plan.to_host()
    for variant in variants.values():
        variant.balancer.close()
    imbalances = plan.initial_imbalance, plan.imbalance
    return {"ms": {n: 1e3 * median(s) for n, s in seconds.items()}, "imbalances": imbalances}


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    parser.add_argument(
        "--ranks", type=int, choices=(2, 4, 8), help="processes (default: 4; toy: 2)"
    )
    parser.add_argument("--only", type=comma_list(LIBRARIES), help=f"of {', '.join(LIBRARIES)}")
    options = parser.parse_args(argv[1:])
    cuda = torch.cuda.is_available() and not options.toy
    size, planes = (SIZE, ("mapped", "messages")) if cuda else (TOY, ("messages",))
    size = replace(size, ranks=options.ranks or size.ranks)
    names = [OWN, *(options.only or LIBRARIES[:1] if cuda and installed("deep_ep") else ())]
    ratios = IMBALANCES[-1:] if options.quick else IMBALANCES
    cases: list[Case] = []
    for plane in planes:
        cases += [(plane, None, ratio) for ratio in ratios] + [(plane, "fp8", IMBALANCES[-1])]
    with report_of_ranks("dispatchers", argv, size.ranks, cuda=cuda) as report:
        results = on_ranks(size.ranks, on_rank, size, names, cases)
        lines = [
            line
            for case, measured in zip(cases, results, strict=True)
            for line in lines_of(case, measured)
        ]
        report.add(f"EP{size.ranks}, {size.tokens} tokens at most, D {size.hidden}", lines)
        report.write(options.json)
        if names == [OWN]:
            report.note("deep_ep is not installed: no other library was measured")


def lines_of(case: Case, measured: dict[str, Any]) -> Iterator[Line]:
    """Yield a line for every variant of one case."""
    plane, quantised, ratio = case
    before, after = measured["imbalances"]
    for name, ms in measured["ms"].items():
        columns: dict[str, Any] = {
            "imbalance": ratio,
            "plane": plane,
            "experts": quantised or "bf16",
        }
        own = ms / measured["ms"][OWN]
        values = {STEP: ms, OF_OWN: own, BEFORE: before, AFTER: after}
        yield Line({**columns, "rows by": name}, values)


if __name__ == "__main__":
    main(sys.argv)
