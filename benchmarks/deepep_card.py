"""DeepEP's `Buffer` as the dispatcher of a layer, beside our own dispatch, in processes on one GPU.

    python benchmarks/deepep_card.py             # needs a GPU, CUDA MPS and DeepEP 1.2
    python benchmarks/deepep_card.py --ranks 4   # instead of 8

Both data planes, with and without replicas, experts in bfloat16 and FP8. Before the timing, outputs
and all gradients are compared with those of our own dispatch: microbatches of unequal sizes, one of
them empty. Outputs of a token are summed in the order of the library, so they differ by rounding.

Shapes: T tokens of a rank, D model width.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Bench, Line, Metric, Mismatch, options_parser
from layers import AFTER, BEFORE, on_ranks, slowest
from mps import ThroughHost, device_of_rank, report_of_ranks
from timing import Host, free, in_turns

import ultraep
from ultraep.runtime.connect import connect

HIDDEN, FFN, EXPERTS, TOP_K, TOKENS = 2048, 768, 64, 8, 2048
UNEQUAL = (500, 3, 0, 1024, 170, 1, 64, 2048)
PATIENCE = 60.0
SMS, BUFFER = 8, 512 << 20  # more multiprocessors than a share of the card hang
LIMIT = 2e-2  # relative, in bfloat16
CASES = (
    ("mapped", "ultraep", None),
    ("mapped", "none", None),
    ("messages", "ultraep", None),
    ("mapped", "ultraep", "fp8"),
)
OWN, LIBRARY = "our dispatch", "DeepEP"
STEP = Metric("step", "ms", "step", ".2f")
ERROR = Metric("largest_relative_difference", "ratio", "difference", ".1e")


def on_rank(rank: int) -> list[dict[str, Any]]:
    """One process: check and time all cases."""
    import deep_ep  # type: ignore[import-not-found]

    device = device_of_rank(cuda=True)
    deep_ep.Buffer.set_num_sms(SMS)
    buffer = deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes=BUFFER)
    results = []
    for plane, policy, quantised in CASES:
        layers = layers_of(buffer, plane, policy, quantised, device)
        case = {"plane": plane, "policy": policy, "experts": quantised or "bfloat16"}
        results.append(case | measured(layers, rank, device))
        for layer in layers.values():
            layer.balancer.close()
        del layers
        free()
    return results


def layers_of(
    buffer: Any, plane: str, policy: str, quantised: str | None, device: torch.device
) -> dict[str, ultraep.BalancedMoE]:
    from ultraep.dispatchers.deepep import DeepEPBuffer

    config = ultraep.BalanceConfig(policy=policy, objective="balance")
    layers = {}
    for name, dispatcher in ((OWN, None), (LIBRARY, DeepEPBuffer(buffer))):
        group = dist.group.WORLD
        balancer = ultraep.Balancer(
            ThroughHost(connect(group, timeout=PATIENCE)) if plane == "messages" else group,
            experts=EXPERTS,
            data_plane=plane,
            config=config,
            dispatcher=dispatcher,
            timeout=PATIENCE,
        )
        layers[name] = ultraep.BalancedMoE.swiglu(
            HIDDEN,
            FFN,
            EXPERTS,
            TOP_K,
            balancer=balancer,
            quantised=quantised,
            dtype=torch.bfloat16,
            device=device,
        )
        router: Any = layers[name].router
        with torch.no_grad():
            router.weight[:4] *= 2  # hot experts
    return layers


def measured(
    layers: dict[str, ultraep.BalancedMoE], rank: int, device: torch.device
) -> dict[str, Any]:
    for tokens in (UNEQUAL[rank], TOKENS):
        one, other = (tensors_of(layer, tokens, rank, device) for layer in layers.values())
        worst = max(map(difference, one, other))
        if not worst <= LIMIT:
            raise Mismatch(f"rank {rank}, {tokens} tokens: outputs or gradients differ by {worst}")
    x = rows_of(TOKENS, rank, device)
    calls = {name: partial(step, layer, x) for name, layer in layers.items()}
    times = in_turns(list(calls), 5, lambda name: slowest(calls[name], 3, device)[0], warmup=2)
    plan = layers[LIBRARY].last_plan
    assert plan is not None
    on_host = plan.to_host()
    return {
        "worst": worst,
        "before": on_host.initial_imbalance,
        "after": on_host.imbalance,
        **{name: 1e3 * median(values) for name, values in times.items()},
    }


def rows_of(tokens: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(rank)
    rows = torch.randn(tokens, HIDDEN, generator=generator, device=device) + 0.3
    return rows.bfloat16().requires_grad_()


def step(layer: ultraep.BalancedMoE, x: torch.Tensor) -> torch.Tensor:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    y: torch.Tensor = layer(x)
    (y.float() * 1.3).sin().sum().backward()
    return y


def tensors_of(
    layer: ultraep.BalancedMoE, tokens: int, rank: int, device: torch.device
) -> list[torch.Tensor]:
    """Output and gradients of a microbatch."""
    x = rows_of(tokens, rank, device)
    y = step(layer, x)
    gradients = [parameter.grad for parameter in layer.parameters()]
    return [y.detach(), *(g for g in (x.grad, *gradients) if g is not None)]


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    size = float(one.double().norm())
    return float((one.double() - other.double()).norm()) / size if size else 0.0


def lines_of(ranks: int, results: list[dict[str, Any]]) -> list[Line]:
    lines = []
    for result in results:
        case = {"ranks": ranks, **{n: result[n] for n in ("plane", "policy", "experts")}}
        for name in (OWN, LIBRARY):
            error = result["worst"] if name == LIBRARY else None
            values = {STEP: result[name], ERROR: error}
            values |= {BEFORE: result["before"], AFTER: result["after"]}
            lines.append(Line(case | {"rows by": name}, values))
    return lines


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8, choices=(4, 8), help="processes")
    options = parser.parse_args(argv[1:])
    ranks: int = options.ranks

    def card(bench: Bench) -> None:
        about = f"D {HIDDEN}, F {FFN}, {EXPERTS} experts, top-{TOP_K}, {TOKENS} tokens a rank"
        bench.table(f"EP{ranks}: {about}", lines_of(ranks, on_ranks(ranks, on_rank)))

    with report_of_ranks("deepep", argv, ranks, cuda=True) as report:
        Bench(report, None, Host(name=""), options).run({"card": card}, ["card"])


if __name__ == "__main__":
    main(sys.argv)
