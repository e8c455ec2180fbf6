"""Checkpoints of balanced models, both ways, beside those of unmodified ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from equality import difference, quiet
from families import batch, build, loss, outputs
from safetensors.torch import load_file

from ultraep.integrations.transformers import (
    balance,
    balanced_experts,
    balanced_from_pretrained,
    unbalance,
)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def texts_in(folder: Path) -> dict[str, Any]:
    return {
        p.name: json.loads(p.read_text()) for p in folder.glob("*.json") if "index" not in p.name
    }


def round_trip(rank: int, group: Any, folder: Path, family: str) -> dict[str, bool]:
    """Save balanced, load balanced, compare with what the library writes and reads."""
    plain, model = build(family), build(family)
    if rank == 0:
        plain.save_pretrained(folder / "plain")
    balance(model, group)
    model.save_pretrained(folder / "balanced", max_shard_size="60KB")
    again = balanced_from_pretrained(
        folder / "plain", group, attn_implementation="eager", dtype=torch.float32
    )
    mine = {n: p.detach().clone() for n, p in again.state_dict().items()}
    read = same(mine, model.state_dict()) and type(again) is type(plain)
    values = [outputs(m.eval(), batch(rank)) for m in (plain, model, again)]
    unbalance(model)
    unbalance(again)
    found = {
        "read": read,
        "equal": torch.equal(values[1], values[2]),
        "close": torch.allclose(values[0], values[1], atol=1e-4),
        "restored": same(dict(plain.state_dict()), dict(again.state_dict())),
        "classes": [type(m) for m in again.modules()] == [type(m) for m in plain.modules()],
        "written": same(tensors_in(folder / "plain"), tensors_in(folder / "balanced")),
        "texts": texts_in(folder / "plain") == texts_in(folder / "balanced"),
        "sharded": len(list((folder / "balanced").glob("model-*.safetensors"))) > 1,
    }
    dist.barrier()
    return found


def round_trips(rank: int, group: Any, folder: Path, families: list[str]) -> list[dict[str, bool]]:
    with quiet():
        return [round_trip(rank, group, folder / family, family) for family in families]
