"""Distributed checkpoints of Megatron-Core: written balanced and read unmodified, and back."""

import pytest
import torch
from megatron_models import make_model, on_ranks, settings
from ranks import shared_pool
from test_megatron_training import DISTRIBUTED, OVERLAP, Training, seeded


def state(training, distributed, *, loading=False):
    """What the library puts into a checkpoint: the model, and its optimizer."""
    (chunk,) = training.chunks
    model = chunk.module.sharded_state_dict()
    way = {"metadata": {"distrib_optim_sharding_type": "dp_reshardable"}} if distributed else {}
    optimizer = training.optimizer.sharded_state_dict(model, is_loading=loading, **way)
    return {"model": model, "optimizer": optimizer}


def other_numbers(training):
    with torch.no_grad():
        for _, parameter in training.parameters():
            parameter.add_(0.25)


@on_ranks
def there_and_back(folder, ddp, writer, reader):
    """Train and save; load elsewhere, and train on both: weights must stay alike."""
    from megatron.core import dist_checkpointing

    seeded()
    first = Training(settings(), ddp, writer)
    first.step(0)
    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(state(first, bool(ddp)), str(folder))
    second = Training(settings(), ddp, reader)
    second.step(5)  # torch's Adam has no state to load into before
    other_numbers(second)
    loaded = dist_checkpointing.load(state(second, bool(ddp), loading=True), str(folder))
    second.chunks[0].module.load_state_dict(loaded["model"])
    with torch.no_grad():  # the library writes into its shards of parameters
        second.optimizer.load_state_dict(loaded["optimizer"])
    at_once = same(first.weights(), second.weights())
    losses = [training.step(1)["losses"] for training in (first, second)]
    return at_once, float((losses[0] - losses[1]).abs().max()), close(first, second)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def close(first, second):
    one, other = first.weights(), second.weights()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("ddp", [{}, DISTRIBUTED | OVERLAP], ids=["DDP", "distributed"])
@pytest.mark.parametrize(("writer", "reader"), [({}, None), (None, {}), ({}, {"slots": 2})])
def test_checkpoints_are_interchangeable(tmp_path, ddp, writer, reader):
    args = {"expert_model_parallel_size": 2}, tmp_path / "checkpoint", ddp, writer, reader
    for at_once, losses, weights in shared_pool().run(2, there_and_back, *args):
        assert at_once
        assert losses < 1e-5
        # The release's distributed optimizer forgets the step of torch's Adam, unmodified too.
        assert weights < 1e-5 or ddp


@on_ranks
def write(folder, options):
    from megatron.core import dist_checkpointing

    (model,) = make_model(settings(), options)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder))
    return {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}


@on_ranks
def read(folder, options):
    from megatron.core import dist_checkpointing

    (model,) = make_model(settings(expert_model_parallel_size=1), options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(loaded["model"])
    return {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}


def test_other_numbers_of_ranks_read_it(tmp_path):
    """Written by two ranks, balanced; read by one that has all experts."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    parts = shared_pool().run(2, write, {"expert_model_parallel_size": 2}, folder, {})
    (whole,) = shared_pool().run(1, read, {}, folder, None)
    for rank, part in enumerate(parts):
        for name, tensor in part.items():
            begin, _, end = name.partition("local_experts.")
            if end:
                index, _, rest = end.partition(".")
                name = f"{begin}local_experts.{int(index) + 4 * rank}.{rest}"
            assert torch.equal(whole[name], tensor), name
