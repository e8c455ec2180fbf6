"""Host time of an eager layer with few tokens, compared with plain torch.

    python benchmarks/bench_host.py                # needs a GPU; a minute
    python benchmarks/bench_host.py --toy          # tiny, for CI; also without a GPU

One rank, router included. `host_forward` is the time until a forward pass without gradients
returns, `host_step` the same with gradients and backward; the device may still be working.
`forward` and `step` also wait for the device. `calls` are the calls of a forward pass, by cProfile.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import KERNELS, Bench, Line, Metric, main
from timing import in_turns, medians
from torch.nn.functional import silu

import ultraep

PLANES = ("messages", "mapped")
HOST_FORWARD = Metric("host_forward", "ms", "host, forward", ".3f")
HOST_STEP = Metric("host_step", "ms", "host, step", ".3f")
FORWARD = Metric("forward", "ms", "forward", ".3f")
STEP = Metric("step", "ms", "step", ".3f")
CALLS = Metric("calls", "calls", "calls of forward", ".0f")


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    hidden: int = 2048
    ffn: int = 768
    experts: int = 64
    top_k: int = 8
    tokens: tuple[int, ...] = (16, 256, 1024)
    rounds: int = 15
    warmup: int = 3  # rounds that do not count
    steps: int = 10  # per round


def time_on_host(bench: Bench) -> None:
    """Measure forward passes and steps of plain torch and of both data planes.

    All sizes and layers take turns, because a machine shared with others has slow moments.
    """
    scale: Scale = bench.scale
    layers: dict[str, Any] = {"torch": PlainLayer(scale, bench)}
    layers |= {plane: balanced_layer(scale, bench, plane) for plane in PLANES}
    draw = partial(torch.randn, device=bench.clock.device, dtype=bench.clock.dtype)
    inputs = {n: draw(n, scale.hidden).requires_grad_() for n in scale.tokens}
    cases = {f"{n} {name}": (name, n) for n in scale.tokens for name in layers}
    values: dict[str, dict[Metric, float]] = {case: {} for case in cases}
    for call, host, whole in ((forward, HOST_FORWARD, FORWARD), (step, HOST_STEP, STEP)):
        calls = {c: partial(call, layers[name], inputs[n]) for c, (name, n) in cases.items()}
        for case, times in host_ms(calls, scale).items():
            values[case] |= dict(zip((host, whole), times, strict=True))
    for case, (name, n) in cases.items():
        once = partial(forward, layers[name], inputs[n])
        values[case][CALLS] = calls_of(once, scale.steps)
    lines = [Line({"tokens": n, "layer": name}, values[c]) for c, (name, n) in cases.items()]
    shape = f"{scale.hidden}/{scale.ffn}/{scale.experts}/{scale.top_k}"
    bench.table(f"one rank, D/F/experts/top-k {shape}, {bench.clock.dtype}, eager", lines)


def forward(layer: Any, x: torch.Tensor) -> None:
    with torch.no_grad():
        layer(x)


def step(layer: Any, x: torch.Tensor) -> None:
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    layer(x).backward(x.detach())


def host_ms(
    calls: Mapping[str, Callable[[], None]], scale: Scale
) -> dict[str, tuple[float, float]]:
    """Median milliseconds per call until the host returns, and until the device has finished."""
    waits: dict[str, list[float]] = {name: [] for name in calls}

    def measure(name: str) -> float:
        finish()
        begin = time.perf_counter()
        for _ in range(scale.steps):
            calls[name]()
        returned = time.perf_counter()
        finish()
        waits[name].append(1e3 * (time.perf_counter() - begin) / scale.steps)
        return 1e3 * (returned - begin) / scale.steps

    hosts = medians(in_turns(list(calls), scale.rounds, measure, warmup=scale.warmup))
    whole = medians({name: values[scale.warmup :] for name, values in waits.items()})
    return {name: (hosts[name], whole[name]) for name in calls}


def finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def calls_of(call: Callable[[], None], times: int) -> float:
    """Calls of Python and C functions by cProfile, on average."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(times):
        call()
    profile.disable()
    finish()
    stats: Any = pstats.Stats(profile)
    return float(stats.total_calls) / times


def balanced_layer(scale: Scale, bench: Bench, plane: str) -> ultraep.BalancedMoE:
    balancer = ultraep.Balancer("alone", experts=scale.experts, data_plane=plane)
    return ultraep.BalancedMoE.swiglu(
        scale.hidden,
        scale.ffn,
        scale.experts,
        scale.top_k,
        balancer=balancer,
        dtype=bench.clock.dtype,
        device=bench.clock.device,
    )


class PlainLayer(torch.nn.Module):
    """A layer of few torch operators: sort, grouped products, index_add."""

    def __init__(self, scale: Scale, bench: Bench) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": bench.clock.device, "dtype": bench.clock.dtype}
        draw = partial(torch.randn, **options)
        hidden, ffn, self.experts = scale.hidden, scale.ffn, scale.experts
        self.top_k = scale.top_k
        shapes = (self.experts, 2 * ffn, hidden), (self.experts, hidden, ffn)
        self.gate_up, self.down = (
            torch.nn.Parameter(draw(shape).mul_(shape[-1] ** -0.5)) for shape in shapes
        )
        self.router = torch.randn(self.experts, hidden, device=bench.clock.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, D]` to `[T, D]`."""
        scores = (x.float() @ self.router.T).softmax(-1)
        gates, ids = scores.topk(self.top_k, -1)
        gates = gates / gates.sum(-1, keepdim=True)
        order = ids.reshape(-1).argsort(stable=True)
        ends = torch.bincount(ids.reshape(-1), minlength=self.experts).cumsum(0).int()
        token = order // self.top_k
        up = torch._grouped_mm(x[token], self.gate_up.mT, offs=ends)
        gate, value = up.chunk(2, -1)
        outputs = torch._grouped_mm(silu(gate) * value, self.down.mT, offs=ends)
        outputs = outputs * gates.reshape(-1)[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, outputs)


if __name__ == "__main__":
    toy = Scale(16, 16, experts=2, top_k=1, tokens=(4,), rounds=1, warmup=0, steps=1)
    scales = {"toy": toy, "quick": Scale(), "full": Scale(rounds=45)}
    main("host", __doc__, {"time": time_on_host}, scales, needs=KERNELS)
