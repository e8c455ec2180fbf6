"""Distributed checkpoints: balanced and unmodified models load each other's."""

import pytest
import torch
from megatron_models import make_model, on_megatron, seed, settings
from test_megatron_training import DISTRIBUTED, OVERLAP, Training


def state(training, distributed, *, loading=False):
    (chunk,) = training.chunks
    model = chunk.module.sharded_state_dict()
    options = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}} if distributed else {}
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=loading, **options)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("ddp", [{}, DISTRIBUTED | OVERLAP], ids=["DDP", "distributed"])
@pytest.mark.parametrize(("writer", "reader"), [({}, None), (None, {}), ({}, {"slots": 2})])
@on_megatron(2, expert_model_parallel_size=2)
def test_checkpoints_are_interchangeable(tmp_path, ddp, writer, reader):
    """Train and save; load into another model, and train both: weights must stay equal."""
    from megatron.core import dist_checkpointing

    seed()
    folder, distributed = tmp_path / "checkpoint", bool(ddp)
    first = Training(settings(), ddp, writer)
    first.step(0)
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state(first, distributed), str(folder))
    second = Training(settings(), ddp, reader)
    second.step(5)  # creates the state of torch's Adam
    with torch.no_grad():
        for _, parameter in second.parameters():
            parameter.add_(0.25)
    loaded = dist_checkpointing.load(state(second, distributed, loading=True), str(folder))
    second.chunks[0].module.load_state_dict(loaded["model"])
    with torch.no_grad():  # the library writes into shards of parameters
        second.optimizer.load_state_dict(loaded["optimizer"])
    torch.testing.assert_close(second.weights(), first.weights(), rtol=0, atol=0)
    losses = [training.step(1)["losses"] for training in (first, second)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    if not distributed:  # the release's distributed optimizer forgets the step of torch's Adam
        torch.testing.assert_close(second.weights(), first.weights(), rtol=0, atol=1e-5)


@on_megatron(2, expert_model_parallel_size=2)
def write(folder, options):
    from megatron.core import dist_checkpointing

    (model,) = make_model(settings(), options)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder))
    return tensors_of(model)


@on_megatron(1)
def read(folder, options):
    from megatron.core import dist_checkpointing

    (model,) = make_model(settings(expert_model_parallel_size=1), options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(loaded["model"])
    return tensors_of(model)


def tensors_of(model):
    state = model.state_dict().items()
    return {name: t.detach().numpy().copy() for name, t in state if isinstance(t, torch.Tensor)}


def test_one_rank_loads_a_checkpoint_of_two_balanced_ranks(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    parts, (whole,) = write(folder=folder, options={}), read(folder=folder, options=None)
    for rank, part in enumerate(parts):
        for name, tensor in part.items():
            begin, _, end = name.partition("local_experts.")
            if end:
                index, _, rest = end.partition(".")
                name = f"{begin}local_experts.{int(index) + 4 * rank}.{rest}"
            assert (whole[name] == tensor).all(), name
