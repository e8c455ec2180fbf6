"""Serve prefill requests of mixed lengths and subjects under one or more policies.

    python examples/prefill.py                                              # one process
    torchrun --nproc-per-node 4 examples/prefill.py --policy none,ultraep   # four ranks, compared

`ultraep_tools.serving.engine` batches the requests. All policies serve the same requests with the
same weights; if their outputs differ, the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
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
from rich.table import Table

import ultraep
from ultraep.files.writing import write_text
from ultraep.parallel.full_state import load_full_state_dict
from ultraep_tools.serving.load import Prompt
from ultraep_tools.tiny.model import TinyMoE
from ultraep_tools.tiny.prefill import Answers, Queue, answer, make_requests


def report(policy: str, answers: Answers, pool_bytes: int) -> dict[str, Any]:
    """Return the results of one policy."""
    turn = answers.turn
    waited = [seconds for seconds in turn.waited if seconds is not None]
    return {
        "policy": policy,
        "batches": turn.microbatches,
        "first_token_mean": fmean(waited),
        "first_token_p95": float(np.percentile(waited, 95)),
        "tokens_per_second": sum(turn.tokens) / turn.seconds,
        "imbalance_before": turn.before,
        "imbalance_before_worst": turn.worst_before,
        "imbalance_after": turn.after,
        "imbalance_after_worst": turn.worst_after,
        "copies": turn.copies,
        "weights_bytes": turn.sent,
        "pool_bytes": pool_bytes,
        "difference": answers.difference,
    }


def table(rows: list[dict[str, Any]], ranks: int, requests: Sequence[Prompt]) -> Table:
    tokens = sum(request.tokens for request in requests)
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
        "replicas": "{copies}",
        "weights sent, all ranks": "{weights}",
        "spare slots per rank": "{pool}",
        "outputs differ by": "{difference:.1e}",
    }
    for name, form in forms.items():
        sizes = [(decimal(row["weights_bytes"]), decimal(row["pool_bytes"])) for row in rows]
        pairs = zip(rows, sizes, strict=True)
        shown.add_row(name, *(form.format(**row, weights=w, pool=p) for row, (w, p) in pairs))
    return shown


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Serve the requests under every policy and print the results."""
    console = Console(quiet=dist.get_rank() != 0)
    saved = torch.load(args.load) if args.load else None
    config = model_config(args, saved and saved["config"])
    queue = Queue(**{field.name: getattr(args, field.name) for field in fields(Queue)})
    requests = make_requests(library_text(), queue)
    with balancer_of(args, config, args.policy[0]) as balancer:
        model = TinyMoE(config, balancer, seed=args.seed, bitwise=args.bitwise)
        model.to(DTYPES[args.dtype]).eval()
        if saved:
            load_full_state_dict(model, saved["model"])
        answers = answer(model, requests, queue, args.policy)
        pool_bytes = max(balancer.comm.gather_objects(balancer.stats()["pool_bytes"]))
        rows = [report(policy, own, pool_bytes) for policy, own in answers.items()]
    console.print(table(rows, dist.get_world_size(), requests))
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--policy", default="none,ultraep", help="policies, separated by commas (%(default)s)"
    )
    serving.add_argument("--requests", type=int, default=200)
    serving.add_argument("--shortest", type=int, default=8, help="min tokens of a request")
    serving.add_argument("--longest", type=int, default=256, help="max tokens of a request")
    serving.add_argument("--budget", type=int, default=1024, help="max tokens per rank and batch")
    serving.add_argument("--rate", type=float, default=0.0, help="requests/s; 0: all at once")
    serving.add_argument("--period", type=int, default=25, help="requests per subject")
    serving.add_argument("--warmup", type=int, default=20, help="untimed requests")
    serving.add_argument("--rounds", type=int, default=3, help="runs of each policy")
    serving.add_argument("--seed", type=int, default=0)
    serving.add_argument(
        "--bitwise", action="store_true", help="compute the same bits under every policy"
    )
    serving.add_argument(
        "--agree",
        type=float,
        default=1e-4,
        help="largest difference of outputs, relative to the largest logit (%(default)s)",
    )
    add_options(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--load", type=Path, help="a checkpoint of train_moe.py")
    files.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args(argv)
    args.policy = args.policy.split(",")
    unknown = set(args.policy) - set(ultraep.policy_names())
    if unknown:
        parser.error(f"unknown policies {sorted(unknown)}, known: {ultraep.policy_names()}")
    if not 1 <= args.shortest <= args.longest <= args.budget:
        parser.error("the order must be 1 <= --shortest <= --longest <= --budget")
    if min(args.requests, args.period, args.rounds) < 1 or min(args.rate, args.warmup) < 0:
        parser.error("--requests, --period, --rounds start at 1, --rate and --warmup at 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with process_group():
        try:
            rows = compare(args)
            if args.json and dist.get_rank() == 0:
                write_text(args.json, json.dumps(rows, indent=1))
        except ultraep.UltraEPError as error:
            print(f"rank {dist.get_rank()}: {error}", file=sys.stderr)
            return 2
        differing = [row["policy"] for row in rows if not row["difference"] <= args.agree]
        if differing and dist.get_rank() == 0:
            policies = f"{args.policy[0]} and {', '.join(differing)}"
            print(f"outputs of {policies} differ by more than {args.agree:g}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
