"""Balanced models compute the outputs, gradients and tokens of unmodified models."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import torch.distributed as dist
from equality import all_batches, assert_same_gradients, compare_all, learn, quiet
from families import FAMILIES, NAMED, batch, build, families_of_the_library
from ranks import on_ranks, shared_pool
from safetensors.torch import load_file

from ultraep import ConfigError, parallel
from ultraep.integrations import common
from ultraep.integrations.transformers import (
    balance,
    balanced_experts,
    balancers,
    unbalance,
)
from ultraep.integrations.transformers import experts as module

TWO = ["mixtral", "gpt_oss"]
THREE = [*TWO, "deepseek_v3"]
ODD = sorted(FAMILIES.keys() & {"zaya", "muse_spark", "nemotron_h"})
GROUPED, BFLOAT16 = {"experts": "grouped_mm"}, {"dtype": torch.bfloat16, "limit": 0.05}
MIXED = {"autocast": True, "limit": 0.02}
CASES = {  # ranks, families, options
    "grouped": (2, THREE, GROUPED),
    "batched": (2, TWO, {"experts": "batched_mm"}),
    "mapped": (2, ["mixtral"], GROUPED | {"mapped": True}),
    "another dispatcher": (2, TWO, GROUPED | {"dispatched": True}),
    "without balancing": (2, TWO, {"policy": "none"}),
    "recompute": (2, TWO, GROUPED | {"recompute": "not reentrant"}),
    "bfloat16": (2, ["mixtral"], BFLOAT16),
    "mixed precision": (2, ["qwen3_moe"], MIXED),
}
MORE_CASES = {
    "uneven": (3, TWO, {}),
    "another dispatcher, uneven": (3, TWO, {"dispatched": True}),
    "another dispatcher, mapped": (2, TWO, GROUPED | {"dispatched": True, "mapped": True}),
    "fewer experts than ranks": (4, ["mixtral"], {"num_local_experts": 3}),
    "bfloat16, grouped": (2, ["gpt_oss", "deepseek_v3"], GROUPED | BFLOAT16),
    "mixed precision, grouped": (2, ["qwen3_moe"], MIXED | GROUPED),
    "eager": (2, [*NAMED, *ODD], {}),
    "four ranks and two slots": (4, THREE, GROUPED | {"slots": 2}),
    "reentrant recompute": (2, THREE, GROUPED | {"recompute": "reentrant"}),
    "float64": (2, THREE, {"dtype": torch.float64, "limit": 1e-12}),
    **{f"all families, {i + 1}": (2, sorted(FAMILIES)[i::4], GROUPED) for i in range(4)},
}


def test_every_family_of_the_registry_is_listed():
    assert families_of_the_library() == FAMILIES.keys()


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case):
    ranks, families, options = CASES[case]
    shared_pool().run(ranks, compare_all, families, options)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES)
def test_outputs_and_gradients_of_more_models(case):
    ranks, families, options = MORE_CASES[case]
    shared_pool().run(ranks, compare_all, families, options)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@on_ranks(2)
def test_ranks_without_tokens(rank, group, experts):
    """Run MoE blocks with tokens on rank 0 only."""
    tokens = torch.randn(1, 12, 32, generator=torch.Generator().manual_seed(5))
    for family in THREE:
        with quiet():
            plain, model = build(family, experts=experts), build(family, experts=experts)
            balancer = balance(model, group)
            for block, plain_block in zip(blocks_of(model), blocks_of(plain), strict=True):
                results = plain_block(tokens), block(tokens if rank == 0 else tokens[:, :0])
                expected, y = (y[0] if isinstance(y, tuple) else y for y in results)
                (y.square().sum() + sum(p.sum() * 0 for p in block.parameters())).backward()
                expected.square().sum().backward()
                assert not y.numel() if rank else torch.allclose(y, expected, atol=1e-5)
            assert_same_gradients(model, plain)
            balancer.close()


def blocks_of(model):
    return [module for module in model.modules() if hasattr(module, "experts")]


@on_ranks(2)
def test_layers_with_different_numbers_of_experts_have_different_balancers(rank, group):
    def two_numbers():
        model, other = build("mixtral"), build("mixtral", num_local_experts=4)
        model.model.layers[1].mlp = other.model.layers[1].mlp
        return model

    with quiet():
        plain, model = two_numbers(), two_numbers()
        learn(plain, all_batches(group))
        first = balance(model, group)
        learn(model, [batch(rank)])
        assert_same_gradients(model, plain)
        assert [balancer.topology.experts for balancer in balancers(model)] == [8, 4]
        assert first in balancers(model)
        with pytest.raises(ConfigError, match=r"has a gradient of home experts.*zero_grad\(\)"):
            unbalance(model)
        model.zero_grad()
        unbalance(model)
        assert all(map(torch.equal, model.parameters(), plain.parameters()))


@on_ranks(4)
def test_two_groups_with_the_same_experts(rank, group, tmp_path):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dp_replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    with quiet():
        plain, model = build("mixtral"), build("mixtral")
        learn(plain, all_batches(group), scale=1 / 4)
        balance(model, groups[rank // 2])
        learn(model, [batch(rank)])
        parallel.average_expert_gradients(model, dp_replicas[rank % 2])
        for parameter in parallel.dense_parameters(model).values():
            parameter.grad /= 4
        assert_same_gradients(model, plain)
        model.save_pretrained(tmp_path / "balanced")
        if rank == 0:
            plain.save_pretrained(tmp_path / "plain")
        dist.barrier()
        files = [load_file(tmp_path / n / "model.safetensors") for n in ("plain", "balanced")]
        assert files[0].keys() == files[1].keys()
        assert all(torch.equal(files[1][name], tensor) for name, tensor in files[0].items())
        model.zero_grad()
        unbalance(model)


@pytest.mark.parametrize(
    ("families", "options"),
    [
        (["mixtral"], {"experts": "eager"}),
        (THREE, {"experts": "grouped_mm"}),
        pytest.param(NAMED, {"experts": "grouped_mm"}, marks=pytest.mark.slow),
        pytest.param(
            THREE,
            {"experts": "grouped_mm", "cache_implementation": "static"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["eager", "grouped", "more families", "static cache"],
)
@on_ranks(2)
def test_generation(rank, group, families, options):
    """Prompts differ in length and number between ranks; rank 0 ends after three tokens."""
    options = dict(options)
    experts = options.pop("experts")
    prompts = batch(rank, rows=1, length=4 + 3 * rank)[: 1 + rank]
    length = prompts.shape[1]
    options |= {"attention_mask": torch.ones_like(prompts), "do_sample": False, "max_new_tokens": 9}
    with quiet():
        for family in families:
            plain, model = (build(family, experts=experts).eval() for _ in range(2))
            free = plain.generate(prompts, eos_token_id=None, **options)
            end = int(free[0, length + 2]) if rank == 0 else None
            expected = plain.generate(prompts, eos_token_id=end, **options)
            balancer = balance(model, group)
            tokens = model.generate(prompts, eos_token_id=end, **options)
            balancer.close()
            assert torch.equal(tokens, expected), (family, tokens, expected)
            assert tokens.shape[1] <= length + 3 if rank == 0 else tokens.shape == (2, length + 9)


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"slots": 2}, "2 of 2 MoE layers balanced (messages plane, 2 slots)"),
        ({"policy": "none"}, "0 of 2 MoE layers balanced: policy='none'"),
        ({"domain": 1, "data_plane": "messages"}, "0 of 2 MoE layers balanced: domain=1"),
    ],
)
@on_ranks(2)
def test_the_first_rank_logs_a_line(rank, group, options, end):
    model = build("mixtral")
    with quiet(), patch.object(common.logger, "info") as info:
        balance(model, group, **options)
        for _ in range(2):
            model(input_ids=batch(rank))
    lines = [call.args[0] for call in info.call_args_list]
    assert lines == ([] if rank else [f"ultraep: {end}"])


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_a_rank_alone_runs_the_experts_of_the_library_on_few_tokens(experts, monkeypatch):
    """Many tokens, or a subscriber of the balancer, need the stages."""
    with quiet(), patch.object(common.logger, "info") as info:
        plain, model = build("mixtral", experts=experts), build("mixtral", experts=experts)
        balancer = balance(model, "alone")
        wanted = learn(plain, [batch(0)])
        for needs_stages in (False, True):
            monkeypatch.setattr(module, "FEW_TOKENS", batch(0).numel() + 1 - needs_stages)
            model.zero_grad()
            torch.testing.assert_close(learn(model, [batch(0)]), wanted)
            assert_gradients_equal(model, plain)
            plans = [layer.last_plan for layer in balanced_experts(model).values()]
            assert [plan is not None for plan in plans] == [needs_stages] * 2
        balancer.reset_stats()
        monkeypatch.undo()
        learn(model, [batch(0)])
        assert not balancer.stats()["microbatches"]
        balancer.subscribe(lambda _: None)
        learn(model, [batch(0)])
        assert balancer.stats()["microbatches"] == 2
    lines = [call.args[0] for call in info.call_args_list]
    assert lines == ["ultraep: 0 of 2 MoE layers balanced: there is only one rank"]


def assert_gradients_equal(model, plain):
    for (name, own), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad, msg=name)
