"""Losses of a GPT of Megatron-Core with Transformer Engine over 20 steps, balanced beside plain.

    python benchmarks/te_losses.py            # needs a GPU, CUDA MPS and Transformer Engine

Four processes share the GPU. Every step has two microbatches in flight: both go forward, then both
go backward. Gradients of weights are added to `main_grad` (`gradient_accumulation_fusion`), the
layer norm and the experts' activations are recomputed in backward, and plain SGD steps in float32.
`plain again` repeats the unmodified model: its difference from `plain` is the noise of the library.
Plans are made for balance, not for time, so that there are replicas at this small size.
NCCL refuses two ranks on one GPU, and gloo has no reduce-scatter, so the distributed optimizer of
the library cannot run here.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from harness import Bench, Line, Metric, options_parser
from layers import AFTER, BEFORE, PLAIN, on_ranks
from load_cases import HotRank
from mps import device_of_rank, report_of_ranks
from timing import Host, free
from whole_models import Choices, Size, last_imbalance, text_batch

STEPS, RATE = 20, 0.02
AGAIN = "plain again"
VARIANTS = {PLAIN: PLAIN, AGAIN: PLAIN, "none": "none", "ultraep": "ultraep"}
FUSED = {
    "gradient_accumulation_fusion": True,
    "recompute_granularity": "selective",
    "recompute_modules": ["moe_act", "layernorm"],
}
SIZE = Size(
    hidden=1024,
    ffn=512,
    experts=32,
    top_k=4,
    tokens=1024,
    ranks=4,
    hot=HotRank(2.0),
    layers=2,
    heads=8,
    sequence_length=512,
)
FIRST = Metric("first_loss", "nats", "first", ".6f")
LAST = Metric("last_loss", "nats", "last", ".6f")
APART = Metric("largest_difference", "nats", "from plain", ".6f")


def on_rank(rank: int, size: Size) -> dict[str, dict[str, Any]]:
    """One process: the losses of every variant, by precision."""
    device = device_of_rank(cuda=True)
    os.environ["ULTRAEP_RATES"] = "off"
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch._dynamo.config.disable = True
    import whole_megatron
    from megatron.core.tensor_parallel import layers

    from ultraep.integrations.megatron import balancers

    layers._grad_accum_fusion_available = True  # Transformer Engine fuses them; Apex is not needed
    results: dict[str, dict[str, Any]] = {}
    for precision in ("BF16", "FP8"):
        engine = getattr(whole_megatron, precision) | FUSED
        of_precision = results[precision] = {}
        for name, variant in VARIANTS.items():
            model = whole_megatron.model_of(size, device, variant, Choices(), engine)
            model.output_layer.gradient_accumulation_fusion = False  # this one needs Apex
            of_precision[name] = train(model, whole_megatron, size, rank, device)
            if variant != PLAIN:
                balancer = balancers(model)[0]
                of_precision[name + " imbalance"] = list(last_imbalance(balancer))
            del model
            free()
    return results


def train(model: Any, whole: Any, size: Size, rank: int, device: torch.device) -> list[float]:
    """The mean losses of all ranks."""
    batch = text_batch(size, rank, device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            if "router.weight" in name:
                parameter[:4] *= 3  # hot experts
    masters = [p.detach().float().clone() for p in model.parameters()]
    losses = []
    for _ in range(STEPS):
        parts = [whole.loss_of(model, part) for part in batch.chunk(2)]
        for part in parts:
            part.backward()
        total = torch.stack([part.detach() for part in parts]).mean().cpu()
        dist.all_reduce(total)
        losses.append(float(total) / size.ranks)
        update(model, masters, size)
    return losses


@torch.no_grad()
def update(model: Any, masters: list[torch.Tensor], size: Size) -> None:
    """One step of SGD; gradients of parameters that all ranks have are summed over the ranks."""
    for (_name, parameter), master in zip(model.named_parameters(), masters, strict=True):
        gradient = parameter.main_grad
        if getattr(parameter, "grad_added_to_main_grad", False):
            parameter.grad_added_to_main_grad = False  # and `grad` has no values
        elif parameter.grad is not None:
            gradient += parameter.grad.float()
        if getattr(parameter, "allreduce", True):  # not an expert
            summed = gradient.cpu()
            dist.all_reduce(summed)
            gradient.copy_(summed)
        master.sub_(gradient, alpha=RATE / size.ranks)
        parameter.copy_(master)
        parameter.grad = None
        gradient.zero_()


def lines_of(results: dict[str, dict[str, Any]]) -> list[Line]:
    lines = []
    for precision, variants in results.items():
        plain = variants[PLAIN]
        for name in VARIANTS:
            losses = variants[name]
            apart = max(abs(one - other) for one, other in zip(losses, plain, strict=True))
            before, after = variants.get(name + " imbalance", (None, None))
            values = {FIRST: losses[0], LAST: losses[-1], APART: apart}
            values |= {BEFORE: before, AFTER: after}
            lines.append(Line({"precision": precision, "variant": name}, values))
    return lines


def main(argv: Sequence[str]) -> None:
    options = options_parser(__doc__).parse_args(argv[1:])
    with report_of_ranks("te_losses", argv, SIZE.ranks, cuda=True) as report:

        def losses(bench: Bench) -> None:
            about = f"{SIZE.layers} layers, {SIZE.about}, {SIZE.tokens} tokens a rank"
            results = on_ranks(SIZE.ranks, on_rank, SIZE)
            bench.table(f"{STEPS} steps, EP{SIZE.ranks}: {about}", lines_of(results))

        Bench(report, SIZE, Host(name=""), options).run({"losses": losses}, ["losses"])


if __name__ == "__main__":
    main(sys.argv)
