"""Trainer and LoRA: gradients, norms, auxiliary losses and checkpoints of balanced models."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import trainers
from adapters import auxiliaries, lora_on_experts, loras
from ranks import shared_pool


def test_trainer_learns_what_it_learns_alone_and_goes_on_where_it_was(tmp_path):
    losses, norms = trainers.alone(tmp_path / "alone", 8)
    for found in shared_pool().run(2, trainers.on_ranks, tmp_path / "ranks"):
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        assert min(norms) > 0.3  # so it was clipped
        assert found["saved"]
        rest = found["losses"][trainers.STEPS // 2 :]
        assert found["resumed"] == pytest.approx(rest, rel=1e-5)
        assert found["same end"]


def test_trainer_refuses_what_would_be_wrong(tmp_path):
    told = shared_pool().run(2, trainers.refusals, tmp_path)
    for one in told:
        assert "is not balanced" in one[0]
        assert "fp16" in one[1]
        assert "has no sharded_state" in one[2]


def test_lora_of_attention_with_frozen_experts():
    cases = [("mixtral", "balance"), ("mixtral", "peft"), ("gpt_oss", "balance")]
    for of_rank in shared_pool().run(2, loras, cases):
        for found in of_rank:
            assert found.pop("learning") == 8
            assert max(found.values()) <= 1e-5


def test_lora_of_experts_is_refused_by_name():
    for before, after in shared_pool().run(2, lora_on_experts):
        assert "layers.0.mlp.experts" in before
        assert "MixtralExperts" in after
        assert "LoRA" in after


def test_auxiliary_losses_and_router_logits():
    families = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"]
    for of_rank in shared_pool().run(2, auxiliaries, families):
        for found in of_rank:
            assert max(found.values()) <= 1e-5
