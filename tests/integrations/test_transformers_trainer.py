"""Trainer and LoRA: gradients, norms, auxiliary losses and checkpoints of balanced models."""

import json
from contextlib import redirect_stdout

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("peft")
pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)

import torch
import torch.distributed as dist
from equality import (
    all_batches,
    assert_close,
    assert_same_gradients,
    forget_accelerate,
    learn,
    quiet,
    under_torchrun,
)
from families import batch, build, outputs, samples, training_arguments
from peft import LoraConfig, get_peft_model
from ranks import on_ranks, shared_pool
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ultraep import ConfigError, parallel
from ultraep.integrations.transformers import BalancedTrainer, balance, balanced_from_pretrained

STEPS = 6


class Losses(TrainerCallback):
    def __init__(self):
        self.losses, self.norms = [], []

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))


def arguments(folder, batch_size, **options):
    usual = {"max_steps": STEPS, "remove_unused_columns": False}
    options = usual | {"train_sampling_strategy": "sequential"} | options
    return training_arguments(folder, batch_size, **options)


def train(trainer_class, model, args, resume=None):
    logged = Losses()
    trainer = trainer_class(model=model, args=args, train_dataset=samples(), callbacks=[logged])
    trainer.train(resume_from_checkpoint=resume)
    return logged.losses, logged.norms


def train_alone(folder):
    forget_accelerate()
    with quiet(), redirect_stdout(None):
        logged = train(Trainer, build("mixtral"), arguments(folder, 8))
    forget_accelerate()
    return logged


def train_on_ranks(rank, group, folder):
    with under_torchrun(rank, group.size()):
        args = arguments(folder, 4, save_strategy="steps", save_steps=STEPS // 2)
        model, again = build("mixtral"), build("mixtral")
        balance(model, group)
        losses, norms = train(BalancedTrainer, model, args)
        saved = balanced_from_pretrained(folder / f"checkpoint-{STEPS}", group)
        for name, tensor in saved.state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name
        balance(again, group)
        middle = str(folder / f"checkpoint-{STEPS // 2}")
        resumed, _ = train(BalancedTrainer, again, args, middle)
        assert resumed == pytest.approx(losses[STEPS // 2 :], rel=1e-5)
        for expected, actual in zip(model.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        dist.barrier()
        return losses, norms


def test_trainer_has_the_losses_of_one_process_and_resumes(tmp_path):
    losses, norms = train_alone(tmp_path / "alone")
    assert min(norms) > 0.3  # so gradients were clipped
    for own_losses, own_norms in shared_pool().run(2, train_on_ranks, tmp_path / "ranks"):
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_norms == pytest.approx(norms, rel=1e-5)


@on_ranks(2)
def test_a_checkpoint_is_whole_or_missing(rank, group, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    options |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    with under_torchrun(rank, group.size()):
        model = build("mixtral")
        balance(model, group)
        trainer = BalancedTrainer(
            model=model,
            args=arguments(tmp_path, 4, **options),
            train_dataset=samples(),
            eval_dataset=samples()[:8],
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "_save_rng_state", raise_full_disk)
            with pytest.raises(OSError, match="No space"):
                trainer.train()
        assert get_last_checkpoint(str(tmp_path)) is None
        assert (tmp_path / ".unfinished" / "checkpoint-2").is_dir()
        dist.barrier()
        trainer.train()
        best = trainer.state.best_model_checkpoint
        if rank == 0:
            names = sorted(path.name for path in tmp_path.iterdir())
            assert names == ["checkpoint-4", "checkpoint-6"]
            assert best in [str(tmp_path / name) for name in names]
            saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
            assert saved["best_model_checkpoint"] == best
        dist.barrier()


def raise_full_disk(folder):
    raise OSError(28, "No space left on device")


@on_ranks(2)
def test_trainer_refusals(rank, group, tmp_path):
    with under_torchrun(rank, group.size()):
        model = build("mixtral")
        with pytest.raises(ConfigError, match="is not balanced"):
            BalancedTrainer(model=model, args=arguments(tmp_path, 4))
        balance(model, group)
        with pytest.raises(ConfigError, match="fp16"):
            BalancedTrainer(model=model, args=arguments(tmp_path, 4, fp16=True))
        trainer = BalancedTrainer(model=model, args=arguments(tmp_path, 4))
        with pytest.raises(ConfigError, match="has no sharded_state"):
            trainer.train(resume_from_checkpoint=str(tmp_path))
        dist.barrier()


ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]}


def adapted(model, **targets):
    """Return the model with random adapters, the same in every process."""
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, **targets))
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


@pytest.mark.parametrize(("family", "first"), [("mixtral", "peft"), ("gpt_oss", "balance")])
@on_ranks(2)
def test_lora_of_attention_with_frozen_experts(rank, group, family, first):
    """Adapt attention before or after balancing."""
    with quiet():
        plain, model = adapted(build(family), **ATTENTION), build(family)
        expected = learn(plain, all_batches(group))[rank]
        if first == "balance":
            balancer = balance(model, group)
            model = adapted(model, **ATTENTION)
        else:
            model = adapted(model, **ATTENTION)
            balancer = balance(model, group)
        (y,) = learn(model, [batch(rank)])
        assert_close(y, expected)
        assert_same_gradients(model, plain)
        assert sum(p.grad is not None for p in model.parameters()) == 8
        parallel.leave_out_experts(model)
        torch.nn.parallel.DistributedDataParallel(model)  # not refused: it ignores experts
        assert_close(outputs(model, batch(rank)), y)
        balancer.close()


@on_ranks(2)
def test_lora_of_experts_is_refused_by_name(rank, group):
    with quiet():
        model = adapted(build("mixtral"), **EXPERTS)
        with pytest.raises(ConfigError, match=r"layers.0.mlp.experts"):
            balance(model, group)
        outputs(model, batch(rank))  # still works
        model = build("mixtral")
        balancer = balance(model, group)
        model = adapted(model, **EXPERTS)
        with pytest.raises(ConfigError, match=r"MixtralExperts.*LoRA"):
            outputs(model, batch(rank))
        balancer.close()


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
@on_ranks(2)
def test_auxiliary_losses_and_router_logits(rank, group, family):
    """With `output_router_logits`, auxiliary losses are computed from each rank's own batch."""

    def losses(model, ids):
        values = model(input_ids=ids, labels=ids, output_router_logits=True)
        values.loss.backward()
        return values

    with quiet():
        plain, model = build(family), build(family)
        expected = [losses(plain, ids) for ids in all_batches(group)][rank]
        balancer = balance(model, group)
        actual = losses(model, batch(rank))
        assert actual.aux_loss > 0
        assert_close(actual.loss, expected.loss)
        assert_close(actual.aux_loss, expected.aux_loss)
        for logits, expected_logits in zip(
            actual.router_logits, expected.router_logits, strict=True
        ):
            assert_close(logits, expected_logits)
        assert_same_gradients(model, plain)
        balancer.close()
