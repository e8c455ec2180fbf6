"""The library's own expert parallelism under FSDP2, balanced."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("ultraep.integrations.transformers.native", exc_type=ImportError)

import torch
import torch.distributed as dist
import transformers
from equality import all_batches, assert_close, learn, under_torchrun
from families import FAMILIES, batch, build
from ranks import on_ranks
from transformers.distributed import DistributedConfig

from ultraep import ConfigError
from ultraep.integrations.transformers import enable, quantised

EXPERTS = "grouped_mm"


def compare(rank, group, folder, family, *, ours, ratio, recompute=False):
    """Compare the library's expert parallelism with the unmodified model in one process.

    ratio: factor between the gradients of experts and the right gradients.
    """
    size = group.size()
    with under_torchrun(rank, size):
        plain = build(family, experts=EXPERTS)
        batches = all_batches(group)
        expected = learn(plain, batches, scale=1 / size)[rank]  # FSDP2 averages over ranks
        if rank == 0 and not folder.exists():
            plain.save_pretrained(folder)
        dist.barrier()
        style = enable(slots=1) if ours else None
        try:
            model_class = getattr(transformers, FAMILIES[family])
            model = model_class.from_pretrained(
                folder,
                distributed_config=DistributedConfig(fsdp_size=size, ep_size=2),
                experts_implementation=EXPERTS,
                attn_implementation="eager",
                dtype=torch.float32,
            ).train()
        finally:
            if style is not None:
                style.disable()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        (y,) = learn(model, [batch(rank)])
        assert_close(y, expected)
        assert_gradients(model, plain, ratio)
        model.save_pretrained(folder.with_suffix(".saved"))
        if rank == 0:
            again = type(plain).from_pretrained(folder.with_suffix(".saved"), dtype=torch.float32)
            state = plain.state_dict()
            assert again.state_dict().keys() == state.keys()
            assert all(torch.equal(t, state[name]) for name, t in again.state_dict().items())
        if style is not None:
            assert len(style.experts) == 2
            assert sum(b.stats()["copies"] for b in style.balancers.values())
            for balancer in style.balancers.values():
                balancer.close()
        dist.barrier()


def assert_gradients(model, plain, ratio):
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        right, gradient = expected[name].grad, parameter.grad
        if right is not None or gradient is not None:
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            assert_close(gradient / ratio if ".experts." in name else gradient, right)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@on_ranks(2)
def test_two_ranks(rank, group, family, tmp_path):
    """Until 5.22, the library divides gradients of experts on one rank twice, also without us."""
    ratio = 0.5 if version("transformers") < "5.23" else 1.0
    compare(rank, group, tmp_path / family, family, ours=False, ratio=ratio)
    recompute = family == "mixtral"
    compare(rank, group, tmp_path / family, family, ours=True, ratio=ratio, recompute=recompute)


@on_ranks(4)
def test_four_ranks_in_two_expert_parallel_groups(rank, group, tmp_path):
    compare(rank, group, tmp_path / "mixtral", "mixtral", ours=True, ratio=1.0)


def test_enabling_twice_or_with_an_unknown_policy():
    with pytest.raises(ConfigError, match="nonsense"):
        enable(policy="nonsense")
    style = enable()
    try:
        with pytest.raises(ConfigError, match="already enabled"):
            enable(slots=2)
    finally:
        style.disable()


def test_what_cannot_be_balanced_is_refused_before_it_is_replaced(monkeypatch, caplog):
    style, experts = enable(), torch.nn.Identity()
    with caplog.at_level("INFO"):
        style.disable()
    assert "ultraep: 0 of 0 MoE layers balanced: no model was created" in caplog.text
    with pytest.raises(ConfigError, match="ep_implementation='all_reduce' of DistributedConfig"):
        style.install_forward(experts, None, ep_implementation="all_reduce")
    experts.config = SimpleNamespace(_experts_implementation="deepgemm_megamoe")
    with pytest.raises(ConfigError, match="sends rows between ranks itself"):
        style.install_forward(experts, None)
    monkeypatch.setattr(quantised, "MXFP4_ROUTED", "forward")  # as until 5.22
    with pytest.raises(ConfigError, match=r"MXFP4 experts needs transformers 5\.23"):
        style.install_forward(quantised.Mxfp4Experts.__new__(quantised.Mxfp4Experts), None)
    assert "forward" not in experts.__dict__
