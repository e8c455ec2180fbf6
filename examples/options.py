"""Shared by train_moe.py and prefill.py: process group, balancer and options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist

import ultraep
from ultraep.topology import even_homes
from ultraep_tools.tiny.model import ModelConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64}


@contextmanager
def process_group(backend: str = "gloo") -> Iterator[None]:
    """Connect the ranks started by torchrun, or this process alone."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def balancer_of(
    args: argparse.Namespace, config: ModelConfig, policy: str
) -> Iterator[ultraep.Balancer]:
    """Open a balancer over all ranks; the experts need not divide evenly."""
    balancer = ultraep.Balancer(
        dist.new_group(),  # separate from the messages of the rest of the model
        experts=even_homes(config.experts, dist.get_world_size()),
        slots=args.slots,
        config=ultraep.BalanceConfig(policy=policy, tolerance=args.tolerance, objective="balance"),
    )
    try:
        yield balancer
    finally:
        balancer.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model and of balancing."""
    shape = parser.add_argument_group("model (default: as in the checkpoint, if any)")
    for field in fields(ModelConfig):
        name = f"--{field.name.replace('_', '-')}"
        if field.type == "bool":
            shape.add_argument(name, action=argparse.BooleanOptionalAction)
        else:
            shape.add_argument(name, type=int, metavar="N", help=f"default {field.default}")
    shape.add_argument("--dtype", choices=DTYPES, default="float32")
    balance = parser.add_argument_group("balance")
    balance.add_argument("--slots", type=int, default=1, help="spare slots per rank (%(default)s)")
    balance.add_argument(
        "--tolerance", type=float, default=0.0, help="allowed imbalance above 1 (%(default)s)"
    )


def model_config(args: argparse.Namespace, saved: Mapping[str, Any] | None) -> ModelConfig:
    """Return the shape from the options, or from the checkpoint."""
    names = [field.name for field in fields(ModelConfig)]
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if saved is None:
        return ModelConfig(**options)
    wrong = {name: value for name, value in options.items() if value != saved[name]}
    if wrong:
        raise ultraep.ConfigError(f"the checkpoint has {dict(saved)}, not {wrong}")
    return ModelConfig(**saved)
