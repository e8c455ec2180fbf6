"""Checkpoints of balanced models, both ways, beside those of unmodified ones."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from equality import quiet
from families import batch, build, outputs
from safetensors.torch import load_file
from transformers.conversion_mapping import get_model_conversion_mapping

from ultraep.integrations.transformers import (
    balance,
    balanced_from_pretrained,
    unbalance,
)
from ultraep.integrations.transformers.load import home_state
from ultraep.integrations.transformers.save import pieces_of


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


def round_trip(rank: int, group: Any, folder: Path, family: str, **sizes: Any) -> dict[str, bool]:
    """Save balanced, load balanced, compare with what the library writes and reads."""
    plain, model = build(family, **sizes), build(family, **sizes)
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
        # Equal weights at other addresses: vector units add in another order (2e-7 on AVX-512).
        "equal": torch.allclose(values[1], values[2], rtol=1e-5, atol=1e-5),
        "close": torch.allclose(values[0], values[1], atol=1e-4),
        "restored": same(dict(plain.state_dict()), dict(again.state_dict())),
        "classes": [type(m) for m in again.modules()] == [type(m) for m in plain.modules()],
        "written": same(tensors_in(folder / "plain"), tensors_in(folder / "balanced")),
        "texts": texts_in(folder / "plain") == texts_in(folder / "balanced"),
        "sharded": len(list((folder / "balanced").glob("model-*.safetensors"))) > 1,
    }
    dist.barrier()
    return found


def round_trips(
    rank: int, group: Any, folder: Path, families: list[str], **sizes: Any
) -> list[dict[str, bool]]:
    with quiet():
        return [round_trip(rank, group, folder / family, family, **sizes) for family in families]


def what_is_read(rank: int, group: Any, folder: Path) -> tuple[int, int]:
    """Numbers that a rank reads of the experts of a checkpoint, and that it has."""
    with quiet(), ExitStack() as opened:
        model = build("gpt_oss") if "gpt_oss" in folder.name else build("mixtral")
        if rank == 0:
            model.save_pretrained(folder)
        balancer = balance(model, group)
        dist.barrier()
        files = [str(path) for path in folder.glob("*.safetensors")]
        state = home_state(model, files, get_model_conversion_mapping(model), opened)
        sizes = {key: math.prod(stored.get_shape()) for key, stored in state.items()}
        balancer.close()
        dist.barrier()
    return sum(sizes.values()), sum(p.numel() for p in model.parameters())


def pieces_at_once(rank: int, group: Any) -> list[tuple[int, set[str]]]:
    """What the rank that writes has in memory for each piece: layers with experts, and bytes."""
    with quiet():
        model = build("mixtral")
        balancer = balance(model, group)
        found = [
            (sum(t.nbytes for t in piece.values()), {n.split(".")[2] for n in piece if "exp" in n})
            for piece in pieces_of(model, wanted=rank == 0)
        ]
        balancer.close()
    return found
