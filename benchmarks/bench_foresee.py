"""Planning and replication that a step waits for, with and without foreseen routes.

    python benchmarks/bench_foresee.py            # eight processes on one GPU, or two on two cores
    python benchmarks/bench_foresee.py --toy      # two CPU processes, tiny, for CI

Every rank is a process, as in `bench_ranks_gpu.py`. A step is several MoE layers in a row, forward
and backward, without attention between them. `plain` plans and replicates in every layer;
`foreseen` calls `Balancer.foresee` before the first layer. Both have the same plans, and their
gradients must be equal bit for bit. Exposed is what the main stream, or the thread of a CPU rank,
spends in the stages plan, verify and replicate, in backward too, plus what it spends in `foresee`:
the mean over ranks, per layer. Waiting for replicas counts. The share is of the layer: step time
over layers. `call` is the time of the host in `foresee`; on a GPU the stream has work meanwhile, as
it has in training. What the main stream spends in `foresee` includes the plans, so they count twice
in `exposed`.

Shapes: T tokens of a rank.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_ranks_gpu import MODELS, TOY, Size
from harness import Line, Metric, Mismatch, options_parser
from layers import (
    AFTER,
    BEFORE,
    COPIES,
    FixedRouter,
    drawn_weights,
    layer_with_weights,
    on_ranks,
    slowest,
)
from load_cases import HotRank, ids_with
from mps import device_of_rank, report_of_ranks
from timing import in_turns, print_progress

import ultraep
from ultraep import BalanceConfig
from ultraep.runtime.clocks import TIMED

PLAIN, FORESEEN = "plain", "foreseen"
EXPOSED = ("plan", "verify", "replicate", "weights again")
CORES = replace(TOY, model="two cores", hidden=256, ffn=512, all_tokens=(512,), rounds=5, steps=2)
LIMIT = 150  # seconds of one case; then every rank prints its stack and ends
BUSY = 50_000_000  # cycles that the GPU is busy when `foresee` is called: about 25 ms
STEP = Metric("step_time_p50", "ms", "step ms", ".3f")
FORESEE = Metric("foresee_time", "ms", "foresee ms", ".3f")
CALL = Metric("foresee_call_time", "ms", "call ms", ".3f")
PER_LAYER = Metric("exposed_per_layer", "ms", "exposed ms", ".4f")
SHARE = Metric("exposed_share_of_layer", "share", "of layer", ".4f")


@dataclass
class Model:
    """The layers of one rank, which share their weights, and the routes of a step."""

    layers: list[ultraep.BalancedMoE]
    routes: list[torch.Tensor]
    gates: torch.Tensor
    x: torch.Tensor
    dy: torch.Tensor
    weights: dict[str, torch.nn.Parameter]

    @property
    def balancer(self) -> ultraep.Balancer:
        return self.layers[0].balancer

    def step(self, name: str) -> None:
        if name == FORESEEN:
            self.balancer.foresee(self.routes)
        for tensor in (self.x, *self.weights.values()):
            tensor.grad = None
        y = self.x
        for layer, ids in zip(self.layers, self.routes, strict=True):
            layer.router.ids, layer.router.gates = ids, self.gates
            y = y + layer(y)
        y.backward(self.dy)

    def gradients(self, name: str) -> list[torch.Tensor]:
        self.step(name)
        tensors = (self.x, *self.weights.values())
        return [tensor.grad.clone() for tensor in tensors if tensor.grad is not None]


def model_of(size: Size, rank: int, device: torch.device, layers: int) -> Model:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    draw = torch.Generator(device=device).manual_seed(rank)
    shape = size.tokens, size.hidden
    x = torch.randn(shape, generator=draw, device=device, dtype=dtype).requires_grad_()
    dy = torch.randn(shape, generator=draw, device=device, dtype=dtype)
    homes = size.experts // size.ranks
    drawn = drawn_weights(size, list(range(rank * homes, (rank + 1) * homes)), device, dtype)
    weights = {name: torch.nn.Parameter(weight) for name, weight in drawn.items()}
    # On CPU ranks experts are so small that replicas would not pay.
    config = BalanceConfig() if device.type == "cuda" else BalanceConfig(objective="balance")
    balancer = ultraep.Balancer(
        dist.group.WORLD, experts=size.experts, config=config, in_flight=2, timeout=120.0
    )
    load = next(load for load in size.loads if load is not None)
    loads_E = load.draw(size)[rank]
    routes = [  # another rank is hot in every layer
        ids_with(np.roll(loads_E, homes * layer), size, seed=rank).to(device)
        for layer in range(layers)
    ]
    gates = torch.full(routes[0].shape, 1 / size.top_k, dtype=dtype, device=device)
    made = [layer_with_weights(balancer, FixedRouter(), weights) for _ in range(layers)]
    return Model(made, routes, gates, x, dy, weights)


def on_rank(rank: int, size: Size, cuda: bool, layers: int) -> dict[str, Any]:
    """Time both variants in turn, then their stages, in one process."""
    device = device_of_rank(cuda=cuda)
    model = model_of(size, rank, device, layers)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    say(rank, "first step")
    model.step(PLAIN)  # allocates memory, measures rates
    if not model.balancer.foresee(model.routes):
        raise Mismatch("nothing was foreseen after a first step")
    model.balancer.foresee(None)
    wanted = model.gradients(PLAIN)
    if not all(map(torch.equal, model.gradients(FORESEEN), wanted)):
        raise Mismatch("foreseen routes change the gradients")
    say(rank, "time steps")
    times = in_turns(
        [PLAIN, FORESEEN],
        size.rounds,
        lambda name: slowest(lambda: model.step(name), size.steps, device)[0],
        warmup=1,
    )
    plans = [layer.last_plan.to_host() for layer in model.layers if layer.last_plan is not None]
    facts: dict[str, Any] = {
        "before": fmean(plan.initial_imbalance for plan in plans),
        "after": fmean(plan.imbalance for plan in plans),
        "replicas": fmean(float(plan.num_replicas) for plan in plans),
    }
    for name, seconds in times.items():
        say(rank, f"time the stages: {name}")
        own = exposed_ms(model, name, size.steps * (TIMED if cuda else 1), device)
        facts[name] = {"step": 1e3 * median(seconds), **own}
    model.balancer.close()
    faulthandler.cancel_dump_traceback_later()
    return facts


def say(rank: int, text: str) -> None:
    if rank == 0:
        print_progress(text)


def exposed_ms(model: Model, name: str, steps: int, device: torch.device) -> dict[str, float]:
    """Exposed milliseconds per layer, the mean over ranks, and those of a call of `foresee`."""
    foresee, call = foresee_ms(model, device) if name == FORESEEN else (0.0, 0.0)
    model.balancer.reset_stats()
    for _ in range(steps):
        dist.barrier()
        model.step(name)
    seconds = model.balancer.stats()["seconds"]
    stages = 1e3 * sum(seconds.get(stage, 0.0) for stage in EXPOSED) / steps
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (stages + foresee) / len(model.layers))
    return {"exposed": fmean(of_ranks), "foresee": foresee, "call": call}


def foresee_ms(model: Model, device: torch.device) -> tuple[float, float]:
    """Milliseconds that the main stream and the host spend in `foresee`; on a CPU, they are one.

    Of the stream, the rank that waits least for the others counts.
    """
    streams, hosts = [], []
    for _ in range(3):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda._sleep(BUSY)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        started = time.perf_counter()
        model.balancer.foresee(model.routes)
        hosts.append(1e3 * (time.perf_counter() - started))
        if device.type == "cuda":
            end.record()
            torch.cuda.synchronize()
            streams.append(begin.elapsed_time(end))
        model.balancer.foresee(None)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, streams or hosts)
    return median(min(same) for same in zip(*of_ranks, strict=True)), median(hosts)


def lines_of(size: Size, layers: int, facts: dict[str, Any]) -> list[Line]:
    lines = []
    for name in (PLAIN, FORESEEN):
        own = facts[name]
        values = {
            STEP: own["step"],
            FORESEE: own["foresee"],
            CALL: own["call"],
            PER_LAYER: own["exposed"],
            SHARE: own["exposed"] / (own["step"] / layers),
            BEFORE: facts["before"],
            AFTER: facts["after"],
            COPIES: facts["replicas"],
        }
        lines.append(Line({"model": size.model, "tokens": size.tokens, "routes": name}, values))
    return lines


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers of a step (default: 4)")
    options = parser.parse_args(argv[1:])
    cuda = torch.cuda.is_available() and not options.toy
    size = TOY if options.toy else MODELS["qwen"] if cuda else CORES
    size = replace(size, loads=(HotRank(2.0 if cuda else 1.5),))
    if options.quick:
        size = replace(size, rounds=min(size.rounds, 5), steps=min(size.steps, 2))
    with report_of_ranks("foresee", argv, size.ranks, cuda=cuda) as report:
        for tokens in size.all_tokens[: 1 if options.quick else None]:
            case = replace(size, tokens=tokens)
            facts = on_ranks(size.ranks, on_rank, case, cuda, options.layers)
            title = f"EP{size.ranks}: {size.about}, {options.layers} layers"
            report.add(title, lines_of(case, options.layers, facts))
            report.write(options.json)


if __name__ == "__main__":
    main(sys.argv)
