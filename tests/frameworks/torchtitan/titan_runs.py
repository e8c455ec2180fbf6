"""Work of one rank in these tests: one pass of a Trainer, or a whole training."""

import contextlib
import logging
import os
import time
import warnings
from unittest.mock import patch

import titan_models  # first: it installs the CUDA stand-ins

# isort: split
import titan_deep_ep
import torch
import torchtitan.trainer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan_cpu import NEW

from ultraep.integrations import common
from ultraep.integrations.torchtitan import BalancedRoutedExperts, balancers

CAST = torch._C.TensorBase.bfloat16


@contextlib.contextmanager
def quiet(rank):
    os.environ["LOCAL_RANK"] = str(rank)
    _clear_sharding_prop_cache()  # it holds meshes of other Trainers of this process
    torch.compiler.reset()
    torch._functorch.config.activation_memory_budget = 1.0  # the framework sets it for the process
    if not NEW:  # the framework's own all-to-all does not compile without it
        torch._functorch.config.unsafe_treat_script_objects_as_zero_size = True
    logging.getLogger().setLevel(logging.ERROR)
    torchtitan.trainer.time = type("time", (), {"sleep": staticmethod(lambda _: None)} | vars(time))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def casts(bfloat16):
    """Let experts multiply in bfloat16, like the framework, or in the dtype of their rows."""
    before = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = CAST if bfloat16 else before
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = before


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def facts(trainer):
    layers = [m for m in trainer.model_parts[0].modules() if isinstance(m, BalancedRoutedExperts)]
    plans = [(layer.layer_index, layer.last_plan.to_host()) for layer in layers]
    return [(i, p.initial_imbalance, p.imbalance, p.num_replicas) for i, p in plans]


def one_pass(rank, group, family, overrides, options):
    if "dispatcher" in options:
        titan_deep_ep.install()
    with quiet(rank), casts(options.get("bfloat16")):
        trainer = titan_models.settings(family, *overrides, **options).build()
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
        tensors = {"outputs": outputs[0], "loss": whole(loss)}
        tensors |= {
            name.replace("_checkpoint_wrapped_module.", ""): whole(parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        layers = facts(trainer)
        trainer.close()
        return tensors, layers


def log_lines(rank, group, *arguments):
    with patch.object(common.logger, "info") as info:
        one_pass(rank, group, *arguments)
    return [call.args[0] for call in info.call_args_list]


def training(rank, group, family, overrides, options, checkpoint=None):
    with quiet(rank), casts(options.get("bfloat16")):
        config = titan_models.settings(family, *overrides, **options)
        for name, value in (checkpoint or {}).items():
            setattr(config.checkpoint, name, value)
        trainer = config.build()
        trainer.metrics_processor.logger = logger = titan_models.tiny.Kept()
        trainer.train()
        weights = {n: whole(p) for n, p in trainer.model_parts[0].state_dict().items()}
        state = trainer.optimizers.state_dict()
        moments = {n: whole(t) for n, t in state.items() if isinstance(t, torch.Tensor)}
        num_balancers = len(balancers(trainer.model_parts))
        trainer.close()
        return logger.steps, weights, moments, num_balancers
