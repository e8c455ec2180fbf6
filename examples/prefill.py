"""Answer prefill requests of mixed lengths and subjects, under one or more policies.

    python examples/prefill.py                                              # one process
    torchrun --nproc-per-node 4 examples/prefill.py --policy none,ultraep   # four ranks, compared

Requests wait in one queue. A batch takes them in order, each to the rank with the fewest tokens,
until the token budget of a rank is used up; on a rank they stand one after the other in a single
sequence. All policies serve the same requests with the same weights, so their outputs must agree:
if they do not, the exit code is 1.

Time is that of a queue: a batch starts when the one before it is finished and its first request
has arrived, and lasts as long as it was measured to.

Shapes: N requests, T tokens, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from model import DTYPES, VOCABULARY, TinyMoE, add_options, balancer_of, model_config, process_group
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from text import Text

import ultraep


@dataclass(frozen=True, slots=True)
class Request:
    """A text to continue, and when it was sent, in seconds."""

    number: int
    arrival: float
    tokens: torch.Tensor  # [T]


@dataclass(frozen=True, slots=True)
class Served:
    """What became of all requests; alike on all ranks."""

    logits: torch.Tensor  # [N, V] of the first new token
    waited: list[float]  # [N] seconds until it
    batches: list[float]  # seconds that each took
    plans: list[ultraep.Plan]


def make_requests(args: argparse.Namespace) -> list[Request]:
    """Lengths spread evenly in their logarithm; subjects come in bursts."""
    rng, text = np.random.default_rng(args.seed), Text()
    low, high = np.log([args.shortest, args.longest + 1])
    lengths = np.exp(rng.uniform(low, high, args.requests)).astype(int).clip(max=args.longest)
    gaps = rng.exponential(1 / args.rate, args.requests) if args.rate else np.zeros(args.requests)
    requests = []
    for number, (length, arrival) in enumerate(zip(lengths, gaps.cumsum(), strict=True)):
        subject = text.shifting(rng, number, 1, args.period)
        tokens = text.sequences(rng, subject, int(length), held_out=True)[0]
        requests.append(Request(number, float(arrival), tokens))
    return requests


def next_batch(waiting: Sequence[Request], ranks: int, budget: int) -> list[list[Request]]:
    """The first requests in the queue that fit, by the rank that serves them."""
    batch: list[list[Request]] = [[] for _ in range(ranks)]
    used = [0] * ranks
    for request in waiting:
        rank = used.index(min(used))
        if used[rank] + len(request.tokens) > budget:
            break
        batch[rank].append(request)
        used[rank] += len(request.tokens)
    return batch


@torch.no_grad()
def first_logits(model: TinyMoE, mine: Sequence[Request], policy: str) -> torch.Tensor:
    """[n, V] of this rank's requests. A rank without any takes part with no tokens."""
    texts = [request.tokens for request in mine] or [torch.empty(0, dtype=torch.int64)]
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    ends = torch.tensor([len(text) for text in texts]).cumsum(0)[: len(mine)] - 1
    logits: torch.Tensor = model(torch.cat(texts)[None], positions[None], policy)
    return logits[0, ends]


def serve(model: TinyMoE, requests: Sequence[Request], policy: str, budget: int) -> Served:
    """Serve all requests, batch after batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    logits = torch.zeros(len(requests), VOCABULARY, dtype=model.norm.weight.dtype)
    waited, plans = [0.0] * len(requests), []
    clock, batches = 0.0, []
    queue = list(requests)
    while queue:
        clock = max(clock, queue[0].arrival)
        batch = next_batch([r for r in queue if r.arrival <= clock], ranks, budget)
        dist.barrier()
        begin = time.perf_counter()
        logits[[r.number for r in batch[rank]]] = first_logits(model, batch[rank], policy)
        lasted = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(lasted, dist.ReduceOp.MAX)
        batches.append(lasted.item())
        clock += lasted.item()
        plans += model.last_plans()
        taken = [request for part in batch for request in part]
        for request in taken:
            waited[request.number] = clock - request.arrival
        queue = queue[len(taken) :]
    dist.all_reduce(logits)  # every rank had its own rows, and zeros elsewhere
    return Served(logits, waited, batches, plans)


def report(
    policy: str, served: Served, first: Served, requests: Sequence[Request], everyone: list[Any]
) -> dict[str, Any]:
    """The numbers of one policy; `first` is what the first policy did, `everyone` the ranks."""
    largest = first.logits.abs().max()
    before = [plan.initial_imbalance for plan in served.plans]
    after = [plan.imbalance for plan in served.plans]
    return {
        "policy": policy,
        "batches": len(served.batches),
        "first_token_mean": fmean(served.waited),
        "first_token_p95": float(np.percentile(served.waited, 95)),
        "tokens_per_second": sum(len(r.tokens) for r in requests) / sum(served.batches),
        "imbalance_before": fmean(before),
        "imbalance_before_worst": max(before),
        "imbalance_after": fmean(after),
        "imbalance_after_worst": max(after),
        "copies": sum(plan.num_replicas for plan in served.plans),
        "weights_bytes": sum(stats["weights_bytes_sent"] for stats in everyone),
        "pool_bytes": max(stats["pool_bytes"] for stats in everyone),
        "difference": ((served.logits - first.logits).abs().max() / largest).item(),
    }


def table(rows: list[dict[str, Any]], ranks: int, requests: Sequence[Request]) -> Table:
    tokens = sum(len(request.tokens) for request in requests)
    shown = Table(title=f"{len(requests)} requests, {tokens:,} tokens, ranks: {ranks}")
    shown.add_column("")
    for row in rows:
        shown.add_column(row["policy"], justify="right")
    forms = {
        "first token, mean (s)": "{first_token_mean:.3f}",
        "first token, p95 (s)": "{first_token_p95:.3f}",
        "tokens/s, all ranks": "{tokens_per_second:,.0f}",
        "imbalance before (worst)": "{imbalance_before:.3f} ({imbalance_before_worst:.3f})",
        "imbalance after (worst)": "{imbalance_after:.3f} ({imbalance_after_worst:.3f})",
        "batches": "{batches}",
        "copies": "{copies}",
        "weights sent, all ranks": "{weights}",
        "spare slots of a rank": "{pool}",
        "outputs differ by": "{difference:.1e}",
    }
    for name, form in forms.items():
        sizes = [(decimal(row["weights_bytes"]), decimal(row["pool_bytes"])) for row in rows]
        pairs = zip(rows, sizes, strict=True)
        shown.add_row(name, *(form.format(**row, weights=w, pool=p) for row, (w, p) in pairs))
    return shown


def measured(
    model: TinyMoE,
    balancer: ultraep.Balancer,
    requests: Sequence[Request],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """A report of every policy. They take turns; of several rounds, the one of median speed."""
    for policy in args.policy:
        serve(model, requests[: args.warmup], policy, args.budget)
    first, rounds = None, []
    for _ in range(args.rounds):
        rows = []
        for policy in args.policy:
            balancer.weights_changed()  # the last policy's copies are no gift to the next
            balancer.reset_stats()
            served = serve(model, requests, policy, args.budget)
            first = first or served
            everyone = balancer.comm.gather_objects(balancer.stats())
            rows.append(report(policy, served, first, requests, everyone))
        rounds.append(rows)
    found = []
    for rows in zip(*rounds, strict=True):
        median = sorted(rows, key=lambda row: row["tokens_per_second"])[len(rows) // 2]
        found.append(median | {"difference": max(row["difference"] for row in rows)})
    return found


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the model, serve the requests under every policy, and show what came out."""
    console = Console(quiet=dist.get_rank() != 0)
    saved = torch.load(args.load) if args.load else None
    config = model_config(args, saved and saved["config"])
    requests = make_requests(args)
    with balancer_of(args, config, args.policy[0]) as balancer:
        model = TinyMoE(config, balancer, seed=args.seed, bitwise=args.bitwise)
        model.to(DTYPES[args.dtype]).eval()
        if saved:
            model.load_full_state(saved["model"])
        rows = measured(model, balancer, requests, args)
    console.print(table(rows, dist.get_world_size(), requests))
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    serving = parser.add_argument_group("serving")
    serving.add_argument("--policy", default="none,ultraep", help="one or more: %(default)s")
    serving.add_argument("--requests", type=int, default=200)
    serving.add_argument("--shortest", type=int, default=8, help="tokens of a request")
    serving.add_argument("--longest", type=int, default=256, help="tokens of a request")
    serving.add_argument("--budget", type=int, default=1024, help="tokens of a rank in a batch")
    serving.add_argument("--rate", type=float, default=0.0, help="per second; 0: all at once")
    serving.add_argument("--period", type=int, default=25, help="requests of one subject")
    serving.add_argument("--warmup", type=int, default=20, help="requests served before, untimed")
    serving.add_argument("--rounds", type=int, default=3, help="turns of each policy")
    serving.add_argument("--seed", type=int, default=0)
    serving.add_argument("--bitwise", action="store_true", help="outputs agree to the last bit")
    serving.add_argument("--agree", type=float, default=1e-4, help="relative (%(default)s)")
    add_options(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--load", type=Path, help="a checkpoint of train_moe.py")
    files.add_argument("--json", type=Path, help="write the report")
    args = parser.parse_args(argv)
    args.policy = args.policy.split(",")
    unknown = set(args.policy) - set(ultraep.policy_names())
    if unknown:
        parser.error(f"unknown policies {sorted(unknown)}, known: {ultraep.policy_names()}")
    if not 1 <= args.shortest <= args.longest <= args.budget:
        parser.error("want 1 <= --shortest <= --longest <= --budget")
    if min(args.requests, args.period, args.rounds) < 1 or min(args.rate, args.warmup) < 0:
        parser.error("--requests, --period and --rounds start at 1, --rate and --warmup at 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with process_group():
        try:
            rows = compare(args)
        except ultraep.UltraEPError as error:
            print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
            return 2
        differing = [row["policy"] for row in rows if not row["difference"] <= args.agree]
        if dist.get_rank() == 0:
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
            if differing:
                told = f"outputs of {args.policy[0]} and {', '.join(differing)}"
                print(f"{told} differ by more than {args.agree:g}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
