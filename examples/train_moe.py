"""Train a small MoE language model on bytes, balancing every microbatch of every layer.

    python examples/train_moe.py                                            # one process
    torchrun --nproc-per-node 4 examples/train_moe.py --policy ultraep      # four ranks

The experts are spread over the ranks. DistributedDataParallel replicates the rest of the model and
averages its gradients. Gradients of experts are already sums over all tokens of the group;
`average_expert_gradients` divides them by the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from library_text import library_text
from options import DTYPES, add_options, balancer_of, model_config, process_group
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import ultraep
from ultraep import parallel
from ultraep.files.writing import whole_file, write_text
from ultraep.parallel import full_state
from ultraep_tools.tiny.model import ModelConfig, TinyMoE, next_byte_loss

LARGEST_NORM = 1.0
CHECKED = 4  # held-out sequences per subject


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step, over all ranks, layers and microbatches."""

    loss: float
    plans: list[ultraep.Plan]
    seconds: float

    def __str__(self) -> str:
        before = fmean(plan.initial_imbalance for plan in self.plans)
        after = fmean(plan.imbalance for plan in self.plans)
        return f"imbalance {before:.2f} -> {after:.2f}"


class Trainer:
    """One rank of the training. The constructor is collective."""

    def __init__(
        self, args: argparse.Namespace, config: ModelConfig, balancer: ultraep.Balancer
    ) -> None:
        self.args, self.balancer, self.text, self.done = args, balancer, library_text(), 0
        model = TinyMoE(config, balancer, seed=args.seed, checkpointing=args.checkpoint)
        self.model = model.to(DTYPES[args.dtype])
        self.parallel = parallel.data_parallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))

    def step(self) -> Step:
        """Run one optimizer step over all its microbatches."""
        begin, parts = time.perf_counter(), self.args.accumulate
        plans, total = [], torch.zeros((), dtype=torch.float64)
        self.optimizer.zero_grad()
        for part in range(parts):
            last = part == parts - 1
            with nullcontext() if last else self.parallel.no_sync():
                loss = next_byte_loss(self.parallel, self.batch(part)) / parts
                plans += self.model.last_plans()
                loss.backward()
            total += loss.detach()
        parallel.average_expert_gradients(self.model)
        parallel.clip_grad_norm(self.model, LARGEST_NORM)
        self.optimizer.step()
        self.done += 1
        dist.all_reduce(total)
        loss_of_all = total.item() / dist.get_world_size()
        return Step(loss_of_all, plans, time.perf_counter() - begin)

    def batch(self, part: int) -> torch.Tensor:
        """Return `[B, T + 1]` sequences: every rank has another text of the same subject."""
        args = self.args
        rng = np.random.default_rng([args.seed, self.done, part, dist.get_rank()])
        subjects = self.text.shifting(rng, self.done, args.tokens // args.length, args.period)
        return self.text.sequences(rng, subjects, args.length + 1)

    @torch.no_grad()
    def check(self) -> float:
        """Return the loss on held-out text, the same text on any number of ranks."""
        subjects = CHECKED * list(range(len(self.text.names)))
        rng, length = np.random.default_rng(0), self.args.length + 1
        tokens = self.text.sequences(rng, subjects, length, held_out=True)
        return next_byte_loss(self.model, tokens).item()

    def save(self, path: Path) -> None:
        """Write a checkpoint with the experts of all ranks."""
        content = {
            "config": asdict(self.model.config),
            "step": self.done,
            "model": full_state.full_state_dict(self.model),
            "optimizer": full_state.full_optimizer_state(self.model, self.optimizer),
        }
        if dist.get_rank() == 0:
            with whole_file(path) as file:
                torch.save(content, file)
        dist.barrier()

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint, saved on any number of ranks."""
        self.done = saved["step"]
        full_state.load_full_state_dict(self.model, saved["model"])
        full_state.load_full_optimizer_state(self.model, self.optimizer, saved["optimizer"])


class Display:
    """Shows a progress bar on a terminal, else ten lines; rank 0 only."""

    def __init__(self, console: Console, args: argparse.Namespace) -> None:
        self.console, self.steps = console, args.steps
        self.tokens = args.tokens * args.accumulate * dist.get_world_size()
        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=console.quiet or not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=args.steps)

    def show(self, done: list[Step]) -> None:
        step = done[-1]
        line = f"loss {step.loss:.3f}   {self.tokens / step.seconds:,.0f} tokens/s   {step}"
        self.bar.update(self.task, advance=1, description=line)
        often = max(1, self.steps // 10)
        if self.bar.disable and (len(done) % often == 0 or len(done) in (1, self.steps)):
            self.console.print(f"step {len(done):>5}   {line}", highlight=False, soft_wrap=True)


def summary(
    args: argparse.Namespace, trainer: Trainer, steps: list[Step], check: float
) -> dict[str, Any]:
    """Return the results of the run, over all ranks; the same on every rank."""
    comm = trainer.balancer.comm
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rss = peak * (1 if sys.platform == "darwin" else 1024)
    everyone = comm.gather_objects(trainer.balancer.stats() | {"rss_bytes": rss})
    seconds: Counter[str] = Counter()
    for stats in everyone:
        seconds.update(stats["seconds"])
    timed = steps[1:] or steps  # the first step is a warmup
    plans = [plan for step in steps for plan in step.plans]
    before = [plan.initial_imbalance for plan in plans]
    after = [plan.imbalance for plan in plans]
    tokens = args.tokens * args.accumulate * comm.size
    return {
        "policy": args.policy,
        "ranks": comm.size,
        "steps": len(steps),
        "losses": [step.loss for step in steps],
        "loss_first": steps[0].loss,
        "loss_last": steps[-1].loss,
        "loss_held_out": check,
        "imbalance_before": fmean(before),
        "imbalance_before_worst": max(before),
        "imbalance_after": fmean(after),
        "imbalance_after_worst": max(after),
        "imbalance_bound": fmean(plan.lower_bound for plan in plans),
        "tokens_per_second": tokens * len(timed) / sum(step.seconds for step in timed),
        "copies": sum(plan.num_replicas for plan in plans),
        "copies_sent": sum(stats["weights_copies_sent"] for stats in everyone),
        "weights_bytes": sum(stats["weights_bytes_sent"] for stats in everyone),
        "gradients_bytes": sum(stats["gradients_bytes_sent"] for stats in everyone),
        "pool_bytes": max(stats["pool_bytes"] for stats in everyone),
        "rss_bytes": max(stats["rss_bytes"] for stats in everyone),
        "seconds": {stage: total / comm.size for stage, total in seconds.items()},
        "seconds_in_all": sum(step.seconds for step in steps),
    }


def table(results: dict[str, Any]) -> Table:
    shown = Table(title=f"policy {results['policy']}, ranks: {results['ranks']}", show_header=False)
    rows = {
        "loss, first and last step": f"{results['loss_first']:.4f} -> {results['loss_last']:.4f}",
        "loss on held-out text": f"{results['loss_held_out']:.4f}",
        "imbalance before, mean (worst)": "{imbalance_before:.3f} ({imbalance_before_worst:.3f})",
        "imbalance after, mean (worst)": "{imbalance_after:.3f} ({imbalance_after_worst:.3f})",
        "imbalance, lower bound, mean": "{imbalance_bound:.3f}",
        "tokens/s, all ranks": f"{results['tokens_per_second']:,.0f}",
        "replicas planned, sent": "{copies}, {copies_sent}",
        "weights sent, all ranks": decimal(results["weights_bytes"]),
        "gradients sent, all ranks": decimal(results["gradients_bytes"]),
        "memory of a rank: spare slots": decimal(results["pool_bytes"]),
        "memory of a rank: peak": decimal(results["rss_bytes"]),
        "seconds in total": f"{results['seconds_in_all']:.2f}",
    }
    for name, value in rows.items():
        shown.add_row(name, value.format(**results))
    for stage, seconds in results["seconds"].items():
        shown.add_row(f"seconds of a rank: {stage}", f"{seconds:.2f}")
    return shown


def parse(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    train = parser.add_argument_group("training")
    train.add_argument("--policy", choices=ultraep.policy_names(), default="ultraep")
    train.add_argument("--steps", type=int, default=100)
    train.add_argument("--tokens", type=int, default=1024, help="tokens per rank and microbatch")
    train.add_argument("--length", type=int, default=64, help="sequence length")
    train.add_argument("--accumulate", type=int, default=1, help="microbatches per step")
    train.add_argument("--period", type=int, default=20, help="steps until the subject changes")
    train.add_argument("--lr", type=float, default=3e-3)
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--checkpoint", action="store_true", help="recompute activations")
    add_options(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--save", type=Path, help="write a checkpoint at the end")
    files.add_argument("--load", type=Path, help="continue from a checkpoint")
    files.add_argument("--json", type=Path, help="write the summary")
    args = parser.parse_args(argv)
    if min(args.steps, args.length, args.accumulate, args.period) < 1:
        parser.error("--steps, --length, --accumulate and --period must be at least 1")
    if args.tokens < 1 or args.tokens % args.length:
        parser.error(f"--tokens {args.tokens} is not a multiple of --length {args.length}")
    return args


def train(args: argparse.Namespace) -> None:
    console = Console(quiet=dist.get_rank() != 0)
    saved = torch.load(args.load) if args.load else None
    config = model_config(args, saved and saved["config"])
    with balancer_of(args, config, args.policy) as balancer:
        trainer = Trainer(args, config, balancer)
        if saved:
            trainer.load(saved)
        display, steps = Display(console, args), []
        with display.bar:
            for _ in range(args.steps):
                steps.append(trainer.step())
                display.show(steps)
        results = summary(args, trainer, steps, trainer.check())
        if args.save:
            trainer.save(args.save)
    console.print(table(results))
    if args.json and dist.get_rank() == 0:
        write_text(args.json, json.dumps(results, indent=1))


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with process_group():
        try:
            train(args)
        except ultraep.UltraEPError as error:
            print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
