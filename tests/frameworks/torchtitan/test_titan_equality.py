"""One batch through torchtitan's Trainer, balanced and unmodified: outputs, loss and gradients.

Experts multiply in float32; `torchtitan_cpu` lists the other differences on CPUs.
"""

import pytest
from titan_models import BALANCED

ULTRAEP, NONE = ((BALANCED, {"slots": 1}),), ((BALANCED, {"policy": "none"}),)
LIMIT = 1e-5  # relative to the largest value of a tensor
TENSOR_PARALLEL = {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}
CASES = {  # family, ranks, settings of both runs
    "qwen3": ("qwen3", 2, {}),
    "deepseek_v3": ("deepseek_v3", 2, {}),
    "gpt_oss": ("gpt_oss", 2, {}),
    "gradient accumulation": ("qwen3", 2, {"accumulate": 3}),
    "experts sharded over two ranks": ("qwen3", 4, {}),
    "two ranks with the same batch": ("qwen3", 2, TENSOR_PARALLEL),
    "everything a DTensor": ("qwen3", 2, {"backend": "full_dtensor"}),
    "bfloat16": ("qwen3", 2, {"bfloat16": True}),
    "forced balance": ("qwen3", 2, {"forced": True}),
}


def assert_same(plain, balanced, limit=LIMIT):
    """Assert equal outputs, losses and gradients on every rank."""
    for (tensors, _), (ours, _) in zip(plain, balanced, strict=True):
        assert ours.keys() == tensors.keys()
        errors = {name: relative_error(ours[name], tensors[name]) for name in tensors}
        assert {name: error for name, error in errors.items() if not error <= limit} == {}
        experts = [name for name in tensors if "inner_experts" in name]
        assert experts
        assert all(tensors[name].abs().max() > 0 for name in experts)


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()


def planned(results):
    """Return index, imbalance before and after, and replicas of each layer."""
    first, *others = [layers for _, layers in results]
    assert others == [first] * len(others)
    assert [index for index, *_ in first] == list(range(len(first)))
    return first


@pytest.mark.parametrize("case", CASES)
def test_balanced(case, passes):
    family, size, settings = CASES[case]
    balanced = passes(family, size, ULTRAEP, **settings)
    for _, before, after, replicas in planned(balanced) if size == 2 else ():  # one group
        assert replicas == 0 and before == after == 1 if "forced" in settings else replicas > 0
    limit = 0.03 if "bfloat16" in settings else LIMIT
    assert_same(passes(family, size, **settings), balanced, limit)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_activation_checkpointing(recompute, passes):
    balanced = passes("qwen3", 2, ULTRAEP, recompute=recompute)
    assert sum(replicas for *_, replicas in planned(balanced)) > 0
    assert_same(passes("qwen3", 2), balanced)


COMPILED = {  # family, ranks, settings of the balanced run beyond those of the unmodified run
    "qwen3": ("qwen3", 2, {}),
    "deepseek_v3": ("deepseek_v3", 2, {}),
    "gpt_oss": ("gpt_oss", 2, {}),
    "full recompute": ("qwen3", 2, {"recompute": "full"}),
    "selective recompute": ("qwen3", 2, {"recompute": "selective"}),
    "memory budget": ("qwen3", 2, {"recompute": "memory budget"}),
    "experts sharded over two ranks": ("qwen3", 4, {}),
    "inductor": ("qwen3", 2, {"compiler": "inductor"}),
}


LONG = ("full recompute", "experts sharded over two ranks")  # compiled


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.long] if c in LONG else []) for c in COMPILED]
)
def test_compiled(case, passes):
    """The framework compiles each block as one graph. It cannot compile its own experts in float32
    on CPUs, so the unmodified run is not compiled.
    """
    family, size, settings = COMPILED[case]
    compiled = passes(family, size, ULTRAEP, **{"compiler": "aot_eager"} | settings)
    if size == 2:
        assert all(replicas > 0 for *_, replicas in planned(compiled))
    assert_same(passes(family, size), compiled)


def test_compiled_like_the_framework(passes):
    settings = {"compiler": "aot_eager", "bfloat16": True}
    plain, balanced = (passes("qwen3", 2, o, **settings) for o in ((), ULTRAEP))
    assert_same(plain, balanced, 0.03)


def test_without_balancing(passes):
    balanced = passes("qwen3", 2, NONE)
    assert all(
        replicas == 0 and after == before > 1 for _, before, after, replicas in planned(balanced)
    )
    assert_same(passes("qwen3", 2), balanced)


@pytest.mark.parametrize(
    ("overrides", "end"),
    [
        (ULTRAEP, "2 of 2 MoE layers balanced (messages plane, 1 slot)"),
        (NONE, "0 of 2 MoE layers balanced: policy='none'"),
    ],
)
def test_the_first_rank_logs_a_line(overrides, end, tmp_path):
    from ranks import shared_pool
    from titan_runs import log_lines

    lines = shared_pool().run(2, log_lines, "qwen3", overrides, {"folder": tmp_path})
    assert lines == [[f"ultraep: {end}"], []]


# The framework's own DeepEP and HybridEP dispatchers move rows by slot id; deep_ep is a stand-in.


TWO_SLOTS = ((BALANCED, {"slots": 2}),)  # HybridEP needs a multiple of 4 slots on two ranks


@pytest.mark.parametrize(
    ("dispatcher", "settings"),
    [
        ("deepep", {}),
        ("deepep", {"recompute": "full"}),
        ("hybridep", {"recompute": "selective"}),
        ("deepep", {"compiler": "aot_eager"}),
        ("hybridep", {"compiler": "aot_eager", "recompute": "full"}),
        ("hybridep", {"accumulate": 2}),
    ],
    ids=str,
)
def test_other_dispatchers(dispatcher, settings, passes):
    plain = {name: value for name, value in settings.items() if name == "accumulate"}
    unmodified = passes("qwen3", 2, dispatcher=dispatcher, **plain)
    balanced = passes("qwen3", 2, TWO_SLOTS, dispatcher=dispatcher, **settings)
    assert all(replicas > 0 for *_, replicas in planned(balanced))
    assert_same(unmodified, balanced)
