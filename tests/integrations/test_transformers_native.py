"""The library's own expert parallelism under FSDP2, with our dispatch."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("ultraep.integrations.transformers.native", exc_type=ImportError)

from native import compare_native
from ranks import shared_pool

from ultraep import ConfigError
from ultraep.integrations.transformers import enable


def compared(ranks, folder, family, **options):
    found = shared_pool().run(ranks, partial(compare_native, **options), folder / family, family)
    for one in found:
        assert max(one["outputs"], one["dense"], one["experts"]) <= 1e-5, one
    assert found[0]["saved"]
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_two_ranks_with_half_the_gradients_that_the_library_gives_there(family, tmp_path):
    """Where one rank alone has an expert, the library under FSDP2 divides its gradient twice.

    So does the unmodified library: all else is right, and with four ranks this is, too.
    """
    theirs = compared(2, tmp_path, family, ep=2, ours=False)
    ours = compared(2, tmp_path, family, ep=2, ours=True, recompute=family == "mixtral")
    for one, other in zip(ours, theirs, strict=True):
        assert one["ratios"] == other["ratios"] == {0.5}
        assert one["copies"]


def test_four_ranks_of_which_two_have_the_same_experts(tmp_path):
    for one in compared(4, tmp_path, "mixtral", ep=2, ours=True):
        assert one["ratios"] == {1.0}
        assert one["layers"] == 2
        assert one["copies"]


def test_enabling_twice_or_with_nonsense():
    with pytest.raises(ConfigError, match="nonsense"):
        enable(policy="nonsense")
    style = enable()
    try:
        with pytest.raises(ConfigError, match="enabled already"):
            enable(slots=2)
    finally:
        style.disable()
