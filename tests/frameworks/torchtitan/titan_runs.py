"""What a rank does in these tests: one pass of a Trainer, or a training; work for `ranks.py`."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings

import titan_models  # first: it brings what replaces CUDA

# isort: split
import torch
import torchtitan.trainer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ultraep.integrations.torchtitan import BalancedRoutedExperts, balancers

CAST = torch._C.TensorBase.bfloat16


@contextlib.contextmanager
def quiet(rank):
    """As torchrun would start it, without a word."""
    os.environ["LOCAL_RANK"] = str(rank)
    _clear_sharding_prop_cache()  # it would hand out meshes of other Trainers of this process
    logging.getLogger().setLevel(logging.ERROR)
    torchtitan.trainer.time = type("time", (), {"sleep": staticmethod(lambda _: None)} | vars(time))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def casts(expected):
    """Experts multiply in bfloat16, as the framework has it, or in the type of their rows."""
    before = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = CAST if expected else before
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = before


def whole(tensor):
    """All of it, wherever it is."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def facts(trainer):
    """Of every balanced layer: its place in order, imbalance before and after, copies."""
    layers = [m for m in trainer.model_parts[0].modules() if isinstance(m, BalancedRoutedExperts)]
    plans = [(layer.layer_index, layer.last_plan.to_host()) for layer in layers]
    return [(i, p.initial_imbalance, p.imbalance, p.num_replicas) for i, p in plans]


def one_pass(rank, group, family, overrides, given):
    """Outputs, loss and all gradients of one batch, and what was planned."""
    with quiet(rank), casts(given.get("bfloat16")):
        trainer = titan_models.settings(family, *overrides, **given).build()
        outputs = []
        model = trainer.model_parts[0]
        model.register_forward_hook(lambda module, inputs, output: outputs.append(whole(output)))
        batches = iter(trainer.dataloader)
        for _ in range(trainer.gradient_accumulation_steps):
            tokens, labels = next(batches)
            count = torch.tensor(labels.numel() * trainer.gradient_accumulation_steps * 2)
            loss = trainer.forward_backward_step(
                input_dict=tokens, labels=labels, global_valid_tokens=count
            )
        gradients = {
            name.replace("_checkpoint_wrapped_module.", ""): whole(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        found = facts(trainer)
        trainer.close()
        return outputs[0], whole(loss), gradients, found


def training(rank, group, family, overrides, given, changes=None):
    """What the framework logged in every step, and all weights at the end."""
    with quiet(rank), casts(given.get("bfloat16")):
        config = titan_models.settings(family, *overrides, **given)
        for name, value in (changes or {}).items():
            setattr(config.checkpoint, name, value)
        trainer = config.build()
        trainer.metrics_processor.logger = kept = titan_models.tiny.Kept()
        trainer.train()
        weights = {n: whole(p) for n, p in trainer.model_parts[0].state_dict().items()}
        owners = balancers(trainer.model_parts)
        moments = optimizer_state(trainer)
        trainer.close()
        return kept.steps, weights, moments, len(owners)


def optimizer_state(trainer):
    """Moments of all parameters."""
    state = trainer.optimizers.state_dict()
    return {n: whole(t) for n, t in state.items() if isinstance(t, torch.Tensor)}
