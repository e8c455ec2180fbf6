"""A MoE layer in eight processes on one GPU, forward and backward, with default settings.

    python benchmarks/bench_ranks_gpu.py                     # needs a GPU and CUDA MPS
    python benchmarks/bench_ranks_gpu.py --models qwen       # one model
    python benchmarks/bench_ranks_gpu.py --tokens 512,8192   # tokens of a rank
    python benchmarks/bench_ranks_gpu.py --imbalance 1.5,3   # of the loads
    python benchmarks/bench_ranks_gpu.py --forward           # forward only, as in a prefill
    python benchmarks/bench_ranks_gpu.py --quantised fp8   # forward, experts in FP8
    python benchmarks/bench_ranks_gpu.py --toy               # two CPU processes, tiny, for CI

Every process is a rank with a share of the multiprocessors of the GPU (`mps.py`) and launches its
own kernels. Four variants alternate: no balancing, the default settings, the objective "balance",
and random even routing as the ceiling. Times are medians over rounds; so are gains and shares, of
the ratios within each round. `eager` launches every kernel; `graphs` replays a CUDA graph
of the step. The ranks measure the rates, as in any training. Outputs and gradients of every variant
are compared with the unbalanced layer before the timing.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Line, Metric, comma_list, options_parser
from layers import (
    AFTER,
    BEFORE,
    COPIES,
    FixedRouter,
    check_variants,
    drawn_weights,
    layer_with_weights,
    on_ranks,
    slowest,
    step_values,
)
from load_cases import HotRank, Shape, ids_with, random_even_ids
from mps import device_of_rank, report_of_ranks
from timing import free, in_turns, on_gpu

import ultraep
from ultraep import BalanceConfig

EVEN = "random even routing"
NONE, DEFAULT, BALANCE = "none", "default", "objective balance"
CONFIGS = {
    NONE: BalanceConfig(policy="none"),
    DEFAULT: BalanceConfig(),
    BALANCE: BalanceConfig(objective="balance"),
}
MODES = ("eager", "graphs")
OF_EVEN = Metric("share_of_random_even_routing", "share", "of even", ".3f")
Step = Callable[[], object]
Facts = dict[str, dict[str, float]]  # per variant


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer and what is measured with it."""

    model: str
    ranks: int = 8
    top_k: int = 8
    all_tokens: tuple[int, ...] = (4096, 512)
    loads: tuple[HotRank | None, ...] = (
        None,
        HotRank(1.5),
        HotRank(2.0),
        HotRank(3.0),
        HotRank(2.0, inner=1.5),
    )
    modes: tuple[str, ...] = MODES
    forward: bool = False  # without backward
    quantised: str | None = None  # format of frozen experts; forward only
    rounds: int = 11
    steps: int = 4  # timed together


MODELS = {
    "qwen": Size(model="Qwen3-235B", hidden=4096, ffn=1536, experts=128, tokens=0),
    "deepseek": Size(model="DeepSeek-V3", hidden=7168, ffn=2048, experts=128, tokens=0),
    "gpt-oss": Size(model="gpt-oss-120b", hidden=2880, ffn=2880, experts=128, top_k=4, tokens=0),
}
TOY = Size(
    model="toy",
    hidden=32,
    ffn=16,
    experts=8,
    top_k=2,
    ranks=2,
    tokens=0,
    all_tokens=(64,),
    loads=(None, HotRank(1.5)),
    modes=("eager",),
    rounds=1,
    steps=1,
)


class Variants:
    """The layer of one rank with every config, with the same weights and tokens."""

    def __init__(
        self,
        size: Size,
        rank: int,
        device: torch.device,
        ratio: float,
        configs: Mapping[str, BalanceConfig] = CONFIGS,
    ) -> None:
        self.size, self.rank, self.device = size, rank, device
        # Without balancing, the busiest rank needs memory for all its rows from the first step.
        self.unbalanced_rows, self.uneven = int(1.1 * ratio * size.rows), ratio > 1
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.router = FixedRouter()
        # All graphs share one pool: they run one at a time, and their results are not read.
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.graphs: list[torch.cuda.CUDAGraph] = []  # the pool lives as long as one graph
        draw = torch.Generator(device=device).manual_seed(rank)
        options: dict[str, Any] = {"generator": draw, "device": device, "dtype": self.dtype}
        shape = size.tokens, size.hidden
        self.x = torch.randn(shape, **options).requires_grad_()
        self.dy = torch.randn(shape, **options)
        homes = size.experts // size.ranks
        home_experts = list(range(rank * homes, (rank + 1) * homes))
        drawn = drawn_weights(size, home_experts, device, self.dtype)
        self.weights = {name: torch.nn.Parameter(weight) for name, weight in drawn.items()}
        self.layers = {name: self._layer(config) for name, config in configs.items()}

    def _layer(self, config: BalanceConfig) -> ultraep.BalancedMoE:
        balancer = ultraep.Balancer(
            dist.group.WORLD,
            experts=self.size.experts,
            config=config,
            capacity=self.unbalanced_rows if config.policy == "none" and self.uneven else "auto",
            timeout=120.0,
        )
        layer = layer_with_weights(balancer, self.router, self.weights, self.size.quantised)
        if self.size.quantised is not None:
            layer.experts.freeze()
        return layer

    def route(self, load: HotRank | None) -> None:
        """Set the choices of this rank's tokens; None: uniformly random choices."""
        size = self.size
        if load is None:
            ids = random_even_ids(size, seed=self.rank)
        else:
            ids = ids_with(load.draw(size)[self.rank], size, seed=self.rank)
        gates = torch.rand(ids.shape, generator=torch.Generator().manual_seed(self.rank))
        self.router.ids = ids.to(self.device)
        self.router.gates = gates.to(self.device, self.dtype).requires_grad_()

    def forget(self) -> None:
        assert self.router.gates is not None
        for tensor in (self.x, self.router.gates, *self.weights.values()):
            tensor.grad = None

    def step(self, name: str) -> torch.Tensor:
        self.forget()
        with torch.set_grad_enabled(not self.size.forward):
            y: torch.Tensor = self.layers[name](self.x)
        if not self.size.forward:
            y.backward(self.dy)
        return y

    def check(self) -> None:
        """Compare outputs and gradients of all variants with `none`."""
        check_variants([NONE, *self.layers], self.step, self.x, self.weights)

    def close(self) -> None:
        for layer in self.layers.values():
            layer.balancer.close()


def on_rank(rank: int, size: Size, cuda: bool) -> list[dict[str, Any]]:
    """Measure all loads and modes of one number of tokens, in one process."""
    device, cases = device_of_rank(cuda=cuda), []
    for load in size.loads:
        # New for every load, because memory grows with the busiest rank and is kept.
        variants = Variants(size, rank, device, 1.0 if load is None else load.ratio)
        for mode in size.modes:
            facts = measure(variants, load, mode)
            name = EVEN if load is None else load.name
            cases.append({"load": name, "mode": mode, "variants": facts})
            if rank == 0:
                print(f"... {size.tokens} tokens, {name}, {mode}", file=sys.stderr, flush=True)
        variants.close()
        del variants
        free()
    return cases


def measure(variants: Variants, load: HotRank | None, mode: str) -> Facts:
    """Seconds per step of every variant and of even routing, in turn."""
    variants.route(load)
    for name in variants.layers:
        variants.step(name)  # allocates memory, measures rates
    variants.check()
    planned = {name: layer.last_plan for name, layer in variants.layers.items()}
    plans = {name: plan.to_host() for name, plan in planned.items() if plan is not None}
    steps = {name: stepper(variants, name, mode) for name in variants.layers}
    routed = variants.router.ids, variants.router.gates
    variants.route(None)
    even = variants.router.ids, variants.router.gates
    steps[EVEN] = stepper(variants, NONE, mode)

    def seconds(name: str) -> float:
        variants.router.ids, variants.router.gates = even if name == EVEN else routed
        elapsed, _ = slowest(steps[name], variants.size.steps, variants.device)
        return elapsed

    seconds_of = in_turns(list(steps), variants.size.rounds, seconds, warmup=1)
    variants.router.ids, variants.router.gates = routed
    facts = {
        name: {
            "step": median(times),
            "gain": median_ratio(seconds_of[NONE], times),
            "of_even": median_ratio(seconds_of[EVEN], times),
        }
        for name, times in seconds_of.items()
    }
    for name, plan in plans.items():
        facts[name] |= {
            "before": plan.initial_imbalance,
            "after": plan.imbalance,
            "copies": float(plan.num_replicas),
        }
    return facts


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds: the clock of the GPU drifts less within one round."""
    return median(time / other for time, other in zip(times, others, strict=True))


def stepper(variants: Variants, name: str, mode: str) -> Step:
    """Return a function that runs one step of a variant, eagerly or as a graph."""
    if mode == "eager":
        return partial(variants.step, name)
    graph = torch.cuda.CUDAGraph()
    variants.step(name)
    variants.forget()
    free()
    dist.barrier()
    with torch.cuda.graph(graph, pool=variants.pool, capture_error_mode="relaxed"):
        variants.step(name)
    variants.graphs.append(graph)
    return graph.replay


def lines_of(size: Size, case: Mapping[str, Any]) -> list[Line]:
    facts: Facts = case["variants"]
    lines = []
    for name, variant in facts.items():
        values = {
            **step_values(size, variant["step"] * 1e3, variant["gain"] * variant["step"] * 1e3),
            OF_EVEN: variant["of_even"],
            BEFORE: variant.get("before"),
            AFTER: variant.get("after"),
            COPIES: variant.get("copies"),
        }
        about = {"tokens": size.tokens, "mode": case["mode"], "load": case["load"]}
        if size.forward:
            about["pass"] = "forward"
        if size.quantised is not None:
            about["experts"] = size.quantised
        lines.append(Line({"model": size.model, **about, "variant": name}, values))
    return lines


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    text = f"models to measure: {', '.join(MODELS)} (default: all)"
    models = comma_list(MODELS)
    parser.add_argument("--models", type=models, default=[*MODELS], metavar="A,B", help=text)
    text = "tokens of a rank (default: 4096,512)"
    parser.add_argument("--tokens", type=token_counts, metavar="N,M", help=text)
    text = "imbalance of the loads, such as 1.5,3 (default: even routing, 1.5, 2 and 3)"
    parser.add_argument("--imbalance", type=ratios, metavar="X,Y", help=text)
    text = "time forward only"
    parser.add_argument("--forward", action="store_true", help=text)
    text = "time forward only, with frozen experts in this format: fp8"
    parser.add_argument("--quantised", choices=["fp8"], metavar="FORMAT", help=text)
    options = parser.parse_args(argv[1:])
    cuda = on_gpu(toy=options.toy) and not options.toy
    sizes = [TOY] if options.toy else [MODELS[name] for name in options.models]
    if options.quick:
        loads = (HotRank(1.5), HotRank(2.0))
        sizes = [replace(size, all_tokens=(4096,), loads=loads) for size in sizes]
    if options.imbalance:
        chosen = tuple(map(HotRank, options.imbalance))
        sizes = [replace(size, loads=chosen) for size in sizes]
    if options.tokens:
        sizes = [replace(size, all_tokens=options.tokens) for size in sizes]
    forward = options.forward or options.quantised is not None
    sizes = [replace(size, forward=forward, quantised=options.quantised) for size in sizes]
    with report_of_ranks("ranks_gpu", argv, sizes[0].ranks, cuda=cuda) as report:
        for size in sizes:
            for tokens in size.all_tokens:
                sized = replace(size, tokens=tokens)
                for case in on_ranks(size.ranks, on_rank, sized, cuda):
                    report.add(f"EP{size.ranks}: {size.about}", lines_of(sized, case))
                report.write(options.json)


def ratios(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def token_counts(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main(sys.argv)
