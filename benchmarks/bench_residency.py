"""What it costs to send copies in every microbatch, beside a promise that weights stay in a step.

    python benchmarks/bench_residency.py          # the model of examples/train_moe.py, EP2
    python benchmarks/bench_residency.py --toy    # tiny, for CI
    python benchmarks/bench_residency.py --card   # eight ranks on one card, mapped memory

Two trainings with the same weights and text take turns, step by step, in one process group; one
of them promises for every step that its weights stay until the optimizer moves them. The cost is
the median of the quotients of neighbouring steps. Layers share the slots: with one buffer, a layer
rarely finds its own copies; with a buffer for each layer it finds those of the microbatch before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from harness import Line, Metric, Report, common_options
from timing import on_gpu, standard_error
from world import on_ranks

import ultraep
from ultraep.tools.demo.train import Trainer, TrainingOptions
from ultraep.tools.report.rows import cpu_device
from ultraep.tools.tiny.model import ModelConfig
from ultraep.tools.tiny.text import Text

STEP = Metric("step_time_p50", "ms", "ms", ".2f")
COST = Metric("cost_of_sending_again", "share", "cost", ".4f")
ERROR = Metric("error_of_cost", "share", "+-", ".4f")
SENT = Metric("weights_sent_in_a_step", "KB", "KB a step", ".0f")
KINDS = ("sent again", "promised")


@dataclass(frozen=True)
class Size:
    """One case; tokens are those of a rank."""

    ranks: int = 2
    layers: int = ModelConfig.layers
    tokens: int = 1024
    microbatches: int = 1  # of a step
    buffers: int = 1
    steps: int = 60


@contextmanager
def trainers(size: Size) -> Iterator[dict[str, Trainer]]:
    """One for each kind, alike but for their balancers."""
    config = ModelConfig(layers=size.layers)
    options = TrainingOptions(
        tokens=size.tokens, length=64, accumulate=size.microbatches, period=20, lr=3e-3, seed=0
    )
    with ExitStack() as stack:
        made = {}
        for kind in KINDS:
            balancer = ultraep.Balancer(
                dist.new_group(),
                experts=config.experts,
                in_flight=size.buffers,
                config=ultraep.BalanceConfig(objective="balance"),
            )
            stack.enter_context(closing(balancer))
            made[kind] = Trainer(config, options, balancer, Text())
        yield made


def on_rank(_: int, size: Size) -> dict[str, list[list[float]]]:
    """For each kind, of every step: seconds of the slowest rank, and bytes that all have sent."""
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with trainers(size) as made:
        for turn in range(size.steps + 3):  # three to warm up
            for kind in KINDS if turn % 2 else reversed(KINDS):  # neither is always the first
                found[kind].append(one_step(made[kind], promised=kind == "promised"))
    return {kind: steps[3:] for kind, steps in found.items()}


def one_step(trainer: Trainer, *, promised: bool) -> list[float]:
    balancer = trainer.balancer
    balancer.reset_stats()
    dist.barrier()
    with balancer.unchanged_weights() if promised else nullcontext():
        seconds = trainer.step().seconds
    told = balancer.comm.gather_objects((seconds, balancer.stats()["weights_bytes_sent"]))
    slowest, sent = max(took for took, _ in told), sum(sent for _, sent in told)
    return [slowest, float(sent)]


def lines(size: Size) -> list[Line]:
    found = {kind: np.array(steps) for kind, steps in on_ranks(size.ranks, on_rank, size).items()}
    quotients = found["sent again"][:, 0] / found["promised"][:, 0] - 1
    made = []
    for kind in KINDS:
        seconds, sent = found[kind].T
        facts = {STEP: median(seconds) * 1e3, SENT: sent.mean() / 1e3}
        cost = {COST: float(np.median(quotients)), ERROR: standard_error(quotients)}
        again = kind == "sent again"
        case = {name: value for name, value in asdict(size).items() if name != "steps"}
        made.append(Line(case | {"copies": kind}, facts | (cost if again else dict.fromkeys(cost))))
    return made


def on_card(json: Path | None) -> None:
    """Forward passes on mapped memory."""
    on_gpu(toy=False)
    from residency_card import FULL, lines

    report = Report("residency", sys.argv, device=torch.cuda.get_device_name())
    report.header()
    report.section = "card"
    about = f"{FULL.layers} layers of {FULL.model}, {FULL.tokens} tokens a rank, EP{FULL.ranks}"
    report.add(f"{about} on one card, forward only, one slot; of all ranks", list(lines(FULL)))
    report.write(json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    common_options(parser)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--steps", type=int, default=60, help="of each kind")
    parser.add_argument("--card", action="store_true", help="prefill of eight ranks of one card")
    options = parser.parse_args()
    if options.card:
        on_card(options.json)
        return
    size = Size(ranks=options.ranks, steps=15 if options.quick else options.steps)
    if options.toy:
        size = Size(layers=1, tokens=128, steps=2)
    cases = [
        size,
        replace(size, microbatches=4),
        replace(size, microbatches=4, buffers=size.layers),
        replace(size, layers=1, microbatches=4),
    ]
    report = Report("residency", sys.argv, device=cpu_device())
    report.header()
    report.section = "training"
    made = [line for case in dict.fromkeys(cases) for line in lines(case)]
    report.add("the training of examples/train_moe.py", made)
    report.note("Cost: median of the quotients of neighbouring steps, less one; +-: its error.")
    report.write(options.json)


if __name__ == "__main__":
    main()
