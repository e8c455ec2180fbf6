"""Whole models of three frameworks, balanced beside unbalanced, with default settings.

    python benchmarks/bench_frameworks.py                      # a GPU with CUDA MPS, or two cores
    python benchmarks/bench_frameworks.py --only transformers
    python benchmarks/bench_frameworks.py --toy                # two CPU processes, tiny
    python benchmarks/bench_frameworks.py --losses             # Megatron-Core trains 20 steps

Every rank is a process. On a GPU, eight ranks share the card, each with a part of its
multiprocessors (`mps.py`). Without a GPU, two ranks have a pinned core and one thread each.
`transformers` and `megatron` time forward and backward of a model, `megatron_te` and
`megatron_te_fp8` the same with Transformer Engine; `transformers_fp8` times forward passes in FP8,
`torchtitan` times steps of its Trainer. Only torchtitan synchronises gradients of replicated
parameters: its FSDP2 does so. `idle` is the balanced model
with random even routing: its additional time is the cost of balancing when nothing is to balance.

The text is Python's own library, one subject per rank. The model's own router routes it, then a
given routing with one hot rank; random even routing is the ceiling. The loss of every variant is
compared with the unmodified framework before anything is timed. On CPUs, unmodified Megatron-Core
and torchtitan are timed as well. On a shared card they would send rows through the host, and
unmodified transformers holds all experts on every rank.

Two gains are predicted with the help of our layers alone, timed in the same run. `by layer`
subtracts from the step what balancing saves in the layers, at most what even routing saves in the
model. `by even` adds to the step with even routing what the balanced layers take longer than the
layers with even routing.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts, D model width.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from bench_ranks_gpu import EVEN, NONE
from harness import Bench, Line, Metric, Mismatch, comma_list, options_parser
from layers import (
    AFTER,
    BEFORE,
    COPIES,
    LESS,
    PLAIN,
    STEP,
    Spent,
    Variants,
    on_ranks,
    results_of_cases,
    slowest,
    step_values,
)
from load_cases import draw, hot, ids_with
from mps import device_of_rank, report_of_ranks
from timing import Host, free, in_turns, print_progress
from whole_models import Choices, Size, WholeModel

from ultraep import Balancer
from ultraep.workload import Load

OURS = "ultraep"
EVEN_LOAD = Load("random even")
OWN, HOT = "own router", "one hot rank"
LOSS_LIMIT = {"cuda": 5e-3, "cpu": 1e-5}  # relative difference: bfloat16, float32
BY_LAYER = Metric("gain_predicted_from_the_layer", "ratio", "by layer", ".3f")
BY_EVEN = Metric("gain_predicted_from_even_routing", "ratio", "by even", ".3f")
OF_EVEN = Metric("share_of_random_even_routing", "share", "of even", ".3f")
FP8, TITAN = "transformers_fp8", "torchtitan"
ENGINE = {"megatron_te": "BF16", "megatron_te_fp8": "FP8"}  # need a GPU and Transformer Engine
FRAMEWORKS = ("transformers", FP8, "megatron", *ENGINE, TITAN)
IDLE, ALONE = "idle", "layers alone"

AGAIN, ROUNDED = "unmodified again", "unmodified, last bits flipped"
REPEATED = (PLAIN, AGAIN, ROUNDED, NONE, OURS)
SHOWN = (1, 5, 10, 20)  # steps
LOSSES = {step: Metric(f"loss_of_step_{step}", "nats", f"step {step}", ".5f") for step in SHOWN}
DIFFERENCE = Metric("greatest_difference_of_losses", "millinats", "1000 x differ", ".3f")

QWEN3_30B = Size(hidden=2048, ffn=768, experts=128, top_k=8, tokens=4096, ranks=8, hot=hot(2.0))
CORES = Size(
    hidden=256,
    ffn=1024,
    experts=8,
    top_k=2,
    tokens=1024,
    ranks=2,
    hot=hot(1.6),
    layers=2,
    heads=4,
    sequence_length=128,
    steps=1,
)
TOY = replace(
    CORES, hidden=32, ffn=16, tokens=64, hot=hot(1.5), layers=1, sequence_length=32, rounds=1
)
SHAPE: dict[str, Any] = {
    "hidden": 1024,
    "ffn": 512,
    "experts": 32,
    "top_k": 4,
    "tokens": 2048,
    "ranks": 4,
}
TRAINED = replace(QWEN3_30B, **SHAPE, layers=2, sequence_length=1024, steps=max(SHOWN))


@contextmanager
def prepared(framework: str, *, cuda: bool) -> Iterator[torch.device]:
    """Let a framework run in this process, on this device."""
    device = device_of_rank(cuda=cuda)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")  # frameworks warn about packages that are not installed
    if framework.startswith("megatron"):  # it compiles small functions when it is imported
        torch._dynamo.config.disable = True
    with ExitStack() as stack:
        if framework == "megatron" and not cuda:
            from megatron_on_cpu import on_cpu  # type: ignore[import-not-found]

            stack.enter_context(on_cpu())
        yield device


def builder(framework: str) -> partial[WholeModel]:
    """The function that builds a variant of a framework's model."""
    if framework not in ENGINE:
        return partial(import_module(f"whole_{framework}").build)
    import_module("transformer_engine.pytorch")
    library = import_module("whole_megatron")
    return partial(library.build, engine=getattr(library, ENGINE[framework]))


def on_rank(rank: int, framework: str, size: Size, cuda: bool) -> dict[str, Any]:
    """One process: check and time all variants of one framework."""
    with prepared(framework, cuda=cuda) as device:
        steps = model_steps(rank, framework, size, device)
    if framework == FP8:  # our layer in the benchmark is not
        return steps
    layer = layer_facts(rank, size, device)
    steps[ALONE] = layer
    hot = steps[HOT]
    none, even = hot[NONE]["step"], hot[EVEN]["step"]
    saved, less = (layer[name]["step"] - layer[OURS]["step"] for name in (NONE, EVEN))
    hot[OURS] |= {"by_layer": none / max(even, none - saved), "by_even": none / (even - less)}
    return steps


def model_steps(
    rank: int, framework: str, size: Size, device: torch.device
) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of a step and imbalance, by routing and variant."""
    choices = Choices()
    hot_ids = ids_with(draw(size.hot, size)[rank], size, rank).long().to(device)
    routings = {OWN: None, HOT: hot_ids}
    even = ids_with(draw(EVEN_LOAD, size)[rank], size, rank).long().to(device)
    build = partial(builder(framework), size, rank, device)
    models = {PLAIN: build(PLAIN, choices)}
    wanted = {name: loss_of(models[PLAIN], choices, ids) for name, ids in routings.items()}
    if framework != FP8 and (device.type == "cuda" or framework == "transformers"):
        del models[PLAIN]
        free()
    limit = LOSS_LIMIT[device.type]
    for variant in (NONE, OURS):
        models[variant] = build(variant, choices)
        for name, ids in routings.items():
            loss = loss_of(models[variant], choices, ids)
            if not abs(loss - wanted[name]) <= limit * abs(wanted[name]):
                what = f"{framework}, {variant}, {name}: the loss is {loss}, unmodified"
                raise Mismatch(f"{what} {wanted[name]} (the limit is a difference of {limit:.1%})")
    measured = {}
    for name, ids in routings.items():
        runs = {variant: (model, ids) for variant, model in models.items()}
        runs |= {EVEN: (models[NONE], even), IDLE: (models[OURS], even)}
        measured[name] = timed(runs, choices, size, device)
    return measured


def loss_of(model: WholeModel, choices: Choices, ids: torch.Tensor | None) -> float:
    choices.ids_TK = ids
    return float(model.loss().detach())


def timed(
    runs: dict[str, tuple[WholeModel, torch.Tensor | None]],
    choices: Choices,
    size: Size,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Seconds of a step of every run, in turns; the slowest rank counts."""
    facts: dict[str, dict[str, float]] = {}

    def measure(name: str) -> Spent:
        model, choices.ids_TK = runs[name]
        spent = slowest(model.step, size.steps, device)
        if name != PLAIN:
            before, after = model.imbalance()
            facts[name] = {"before": before, "after": after}
        return spent

    for name, spent in in_turns(list(runs), size.rounds, measure, warmup=2).items():
        elapsed, busy = (median(values) for values in zip(*spent, strict=True))
        facts.setdefault(name, {}).update(step=elapsed, busy=busy)
    return {name: facts[name] for name in runs}


def layer_facts(rank: int, size: Size, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds of our layers without the model: one hot rank, balanced or not, and even routing.

    One step runs as many layers as the model has. With one layer per step, a busy CPU rank returns
    more memory to the system, and has more page faults per layer than in the model.
    """
    variants = Variants(size, rank, device)
    for name, policy in ((NONE, "none"), (OURS, "ultraep")):
        rows: Any = int(1.1 * (size.hot.imbalance or 1) * size.rows) if name == NONE else "auto"
        experts = size.experts
        balancer = Balancer(dist.group.WORLD, experts=experts, policy=policy, capacity=rows)
        variants.add(name, balancer, size.layers)
    cases = {NONE: (NONE, size.hot), OURS: (OURS, size.hot), EVEN: (NONE, EVEN_LOAD)}
    loads = {load: draw(load, size) for load in (size.hot, EVEN_LOAD)}

    def spent(name: str) -> Spent:
        variant, load = cases[name]
        variants.route(loads[load])
        return slowest(partial(variants.step, variant), size.steps, device)

    facts = {}
    for name, times in in_turns(list(cases), size.rounds, spent, warmup=2).items():
        elapsed, busy = (median(values) for values in zip(*times, strict=True))
        facts[name] = {"step": elapsed, "busy": busy}
    variants.close()
    return facts


def lines_of(size: Size, measured: dict[str, Any]) -> list[Line]:
    lines = []
    for routing, variants in measured.items():
        for name, facts in variants.items():
            values = {
                **step_values(size, facts["step"] * 1e3, variants[NONE]["step"] * 1e3),
                LESS: variants[NONE]["busy"] / facts["busy"],
                BY_LAYER: facts.get("by_layer"),
                BY_EVEN: facts.get("by_even"),
                OF_EVEN: variants[EVEN]["step"] / facts["step"],
                BEFORE: facts.get("before"),
                AFTER: facts.get("after"),
            }
            lines.append(Line({"routing": routing, "variant": name}, values))
    return lines


def run(framework: str, bench: Bench, *, cuda: bool) -> None:
    size: Size = bench.scale
    if framework == TITAN and cuda:  # two models with the state of their optimizers, on eight ranks
        size = replace(size, layers=2)
    measured = on_ranks(size.ranks, on_rank, framework, size, cuda)
    about = f"{size.layers} layers, {size.about}, {size.tokens} tokens a rank"
    bench.table(f"{framework}, EP{size.ranks}: {about}", lines_of(size, measured))


def losses_on_rank(
    rank: int, cases: Sequence[tuple[str, str]], framework: str, size: Size, cuda: bool
) -> Iterator[dict[str, Any]]:
    """One process: train a model for every case, a part that is recomputed and a variant."""
    with prepared(framework, cuda=cuda) as device:
        options = dict(builder(framework).keywords.get("engine", {}))
        if options:
            options["gradient_accumulation_fusion"] = True
        train = import_module("whole_megatron_losses").train
        for recomputed, variant in cases:
            part = {"recompute_granularity": "selective", "recompute_modules": [recomputed]}
            policy = PLAIN if variant in REPEATED[:3] else variant
            yield train(size, rank, device, policy, options | part, flipped=variant == ROUNDED)


def run_losses(framework: str, bench: Bench, *, cuda: bool) -> None:
    """Print the losses of every variant; a run that is interrupted prints what it has."""
    size: Size = bench.scale
    recomputed = {"moe_act": REPEATED, "moe": (PLAIN, OURS)} if cuda else {"moe": REPEATED}
    cases = [(part, variant) for part, variants in recomputed.items() for variant in variants]
    lines, plain = list[Line](), dict[str, list[float]]()
    try:
        found = results_of_cases(size.ranks, losses_on_rank, cases, framework, size, cuda)
        for (part, variant), facts in found:
            print_progress(f"{part}, {variant}: {facts}")
            if facts is None:
                continue
            losses = facts["losses"]
            pairs = zip(losses, plain.setdefault(part, losses), strict=True)
            values: dict[Metric, float | None] = {
                LOSSES[step]: losses[step - 1] for step in SHOWN if step <= size.steps
            }
            values[DIFFERENCE] = 1e3 * max(abs(loss - other) for loss, other in pairs)
            values[COPIES] = facts["replicas"]
            values[STEP] = 1e3 * median(facts["seconds"][size.steps // 4 :])
            lines.append(Line({"recomputed": part, "variant": variant}, values))
    finally:
        about = f"{size.layers} layers, {size.about}, {size.tokens} tokens a rank"
        bench.table(f"{framework}, EP{size.ranks}: {about}, {size.steps} steps of Adam", lines)
    if len(lines) < len(cases):
        raise Mismatch(f"{framework}: {len(cases) - len(lines)} of {len(cases)} cases failed")


def obstacle(framework: str) -> str | None:
    """Return why a framework cannot be imported: it, or what it requires, is missing or too old."""
    if framework in ENGINE and not torch.cuda.is_available():
        return "it needs a GPU"
    code = f"import sys; sys.path[:] = {sys.path!r}; import bench_frameworks as b"
    code += f"; b.builder({framework!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip() or "no message").splitlines()[-1]
    if not reason.startswith(("ImportError", "ModuleNotFoundError")):
        raise SystemExit(done.stderr)
    return reason


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    only = comma_list(FRAMEWORKS)
    parser.add_argument("--only", type=only, metavar="A,B", help=", ".join(FRAMEWORKS))
    parser.add_argument(
        "--losses", action="store_true", help="losses of optimizer steps of Megatron-Core, no times"
    )
    options = parser.parse_args(argv[1:])
    cuda = torch.cuda.is_available() and not options.toy
    size = TOY if options.toy else QWEN3_30B if cuda else CORES
    if options.quick:
        size = replace(size, rounds=3)
    name, measure = "frameworks", run
    if options.losses:
        name, measure = "frameworks_te_losses", run_losses
        size = replace(size, steps=5) if options.toy else TRAINED
    sections = {framework: partial(measure, framework, cuda=cuda) for framework in FRAMEWORKS}
    names = options.only or list(ENGINE if options.losses else FRAMEWORKS)
    obstacles = {name: obstacle(name) for name in names}
    with report_of_ranks(name, argv, size.ranks, cuda=cuda) as report:
        for framework, reason in obstacles.items():
            if reason:
                report.note(f"{framework} cannot run here: {reason}")
        bench = Bench(report, size, Host(name=""), options)
        bench.run(sections, [framework for framework in names if not obstacles[framework]])


if __name__ == "__main__":
    main(sys.argv)
