"""Balanced models write the library's checkpoints, and read only their home experts."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack

import pytest

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import torch
import torch.distributed as dist
from equality import quiet
from families import FAMILIES, batch, build, outputs
from ranks import on_ranks
from safetensors.torch import load_file
from transformers.conversion_mapping import get_model_conversion_mapping

from ultraep.integrations.transformers import balance, balanced_from_pretrained, unbalance
from ultraep.integrations.transformers.load import home_state

# The library cannot load this text model by itself: its class has no configuration.
LOADABLE = sorted(FAMILIES.keys() - {"mistral_large4"})


def tensors_in(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def texts_in(folder):
    files = [path for path in folder.glob("*.json") if "index" not in path.name]
    return {path.name: json.loads(path.read_text()) for path in files}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def round_trip(rank, group, folder, family, **sizes):
    """Save and load a balanced model; compare with the files and weights of the library."""
    plain, model = build(family, **sizes), build(family, **sizes)
    if rank == 0:
        plain.save_pretrained(folder / "plain")
    balance(model, group)
    model.save_pretrained(folder / "balanced", max_shard_size="60KB")
    again = balanced_from_pretrained(
        folder / "plain", group, attn_implementation="eager", dtype=torch.float32
    )
    assert type(again) is type(plain)
    assert_equal(again.state_dict(), model.state_dict())
    expected, saved, loaded = (outputs(m.eval(), batch(rank)) for m in (plain, model, again))
    assert torch.allclose(expected, saved, atol=1e-4)
    # The order of sums depends on the alignment of weights (2e-7 on AVX-512).
    assert torch.allclose(saved, loaded, rtol=1e-5, atol=1e-5)
    unbalance(model)
    unbalance(again)
    assert_equal(plain.state_dict(), again.state_dict())
    assert [type(m) for m in again.modules()] == [type(m) for m in plain.modules()]
    assert_equal(tensors_in(folder / "plain"), tensors_in(folder / "balanced"))
    assert texts_in(folder / "plain") == texts_in(folder / "balanced")
    assert len(list((folder / "balanced").glob("model-*.safetensors"))) > 1
    dist.barrier()


@pytest.mark.parametrize(
    ("families", "sizes"),
    [
        (["mixtral", "gpt_oss", "deepseek_v3"], {}),
        (["mixtral", "gpt_oss"], {"num_local_experts": 5}),  # uneven
        *(pytest.param(LOADABLE[i::2], {}, marks=pytest.mark.slow) for i in range(2)),
    ],
    ids=["some", "uneven", "first half", "second half"],
)
@on_ranks(2)
def test_families_are_saved_and_loaded(rank, group, families, sizes, tmp_path):
    with quiet():
        for family in families:
            round_trip(rank, group, tmp_path / family, family, **sizes)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@on_ranks(2)
def test_a_rank_reads_and_stores_only_its_home_experts(rank, group, family, tmp_path):
    with quiet(), ExitStack() as opened:
        model = build(family)
        whole = sum(p.numel() for p in model.parameters())
        if rank == 0:
            model.save_pretrained(tmp_path)
        balancer = balance(model, group)
        dist.barrier()
        files = [str(path) for path in tmp_path.glob("*.safetensors")]
        state = home_state(model, files, get_model_conversion_mapping(model), opened)
        sizes = [math.prod(stored.get_shape()) for stored in state.values()]
        balancer.close()
        dist.barrier()
    stored = sum(p.untyped_storage().nbytes() // p.itemsize for p in model.parameters())
    assert sum(sizes) == stored < whole
