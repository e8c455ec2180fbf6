"""Training beside DDP and FSDP2 is that of one process; what would damage experts is refused."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from dense import Example, assert_close
from ranks import shared_pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from trained import Training, assert_same_history, balanced, grid, reference

from ultraep import Balancer, ConfigError, LocalGroup, parallel
from ultraep.experts import Experts

WAYS = [
    ("ddp", 2, 2),
    ("ddp", 3, 3),  # one rank has no experts
    ("ddp", 2, 1),  # every rank has all experts
    ("ddp", 4, 2),  # two groups with the same experts
    ("fsdp", 4, 2),
    ("fsdp, experts too", 4, 2),
    ("fsdp, experts too", 2, 2),  # no other rank has the same
]


def train(rank, group, way, ep):
    training = Training(way, ep)
    training.backward()
    mine = list(training.bare.moe.experts.home_experts)
    expected, gradients = reference(3)
    for name, found in training.whole_gradients().items():
        right = gradients[name][mine] if ".experts." in name else gradients[name]
        assert_close(found, right, name)
    assert_same_history(training.steps(3), expected)
    assert ep == 1 or training.bare.moe.last_plan.num_replicas > 0


@pytest.mark.parametrize(("way", "ranks", "ep"), WAYS, ids=str)
def test_gradients_norms_and_losses_are_those_of_one_process(way, ranks, ep):
    shared_pool().run(ranks, train, way, ep)


def by_ddp(model):
    DistributedDataParallel(model)


def by_fsdp1(model):
    FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def by_fully_shard(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def by_distribute_module(model):
    distribute_module(model, init_device_mesh("cpu", (2,)))


def refused(rank, group, wrap, homes, frozen, message):
    warnings.filterwarnings("ignore", "FSDP will not all-gather")
    model = balanced(group, homes)
    model.moe.experts.requires_grad_(not frozen)
    before = copy.deepcopy(model.moe.experts)
    with pytest.raises(ConfigError) as error:
        wrap(model)
    assert message in str(error.value)
    assert "but each of ranks [0, 1] has other experts: exclude them" in str(error.value)
    if wrap in (by_ddp, by_fully_shard):  # the others write first
        assert torch.equal(model.moe.experts.gate_up_proj, before.gate_up_proj)


UNEVEN = [0, 0, 0, 0, 0, 1, 1, 1]
DDP_MESSAGE = "DistributedDataParallel would treat 'moe.experts' as the same on ranks [0, 1], "
FSDP1_MESSAGE = "FullyShardedDataParallel would treat 'moe.experts' as the same on ranks [0, 1], "
DTENSOR_MESSAGE = "'gate_up_proj' of home experts would become one DTensor of ranks [0, 1], "


@pytest.mark.parametrize(
    ("wrap", "homes", "frozen", "message"),
    [
        (by_ddp, None, False, DDP_MESSAGE),
        (by_ddp, None, True, DDP_MESSAGE),  # nothing to average, but it would be overwritten
        (by_ddp, UNEVEN, False, DDP_MESSAGE),
        (by_fsdp1, None, False, FSDP1_MESSAGE),
        (by_fully_shard, None, False, DTENSOR_MESSAGE),
        (by_fully_shard, UNEVEN, False, DTENSOR_MESSAGE),
        (by_distribute_module, None, False, DTENSOR_MESSAGE),
    ],
    ids=["ddp", "ddp-frozen", "ddp-uneven", "fsdp1", "fsdp2", "fsdp2-uneven", "distribute_module"],
)
def test_what_takes_experts_to_be_the_same_is_refused_on_every_rank(wrap, homes, frozen, message):
    shared_pool().run(2, refused, wrap, homes, frozen, message)


def alike_in_ddp(rank, group):
    experts, _ = grid(1)
    wrapped = DistributedDataParallel(balanced(experts))
    wrapped(torch.ones(3, 16, dtype=torch.float64)).sum().backward()
    assert wrapped.module.moe.experts.down_proj.grad is not None


def test_plain_ddp_is_right_where_every_rank_has_all_experts():
    shared_pool().run(2, alike_in_ddp)


def made_elsewhere(rank, group):
    model = balanced(group)
    model._ddp_params_and_buffers_to_ignore = ["after.bias"]
    parallel.leave_out_experts(model)
    wrapped = DistributedDataParallel(model)
    assert wrapped.parameters_to_ignore == {"after.bias", *parallel.expert_parameters(model)}


def test_ddp_that_others_make_leaves_out_experts_and_what_was_left_out_before():
    shared_pool().run(2, made_elsewhere)


def wrong_alike(rank, group):
    training = Training("ddp", 2)
    training.model(training.x).sum().backward()
    message = r"ranks \[0, 1\] are among the ranks .* spread over, \[0, 1\]"
    with pytest.raises(ConfigError, match=message):
        parallel.average_expert_gradients(training.model, group)
    training = Training("ddp", 1)
    training.model(training.x).sum().backward()
    with pytest.raises(ConfigError, match="the job has 2 ranks, but the experts are spread over 1"):
        parallel.average_expert_gradients(training.model)


def test_ranks_that_are_not_alike_are_refused():
    shared_pool().run(2, wrong_alike)


def test_parameters_are_told_apart_and_marked():
    example = Example([4] * 2, shared_ffn=4)

    def work(comm):
        layer = example.layer(Balancer(experts=8, communicator=comm))
        experts = parallel.expert_parameters(layer)
        assert list(experts) == ["experts.gate_up_proj", "experts.down_proj"]
        assert all(parameter.expert_ranks == (0, 1) for parameter in experts.values())
        dense = parallel.dense_parameters(layer)
        assert list(dense) == ["router.weight", "shared.gate_up.weight", "shared.down.weight"]
        assert not any(hasattr(parameter, "expert_ranks") for parameter in dense.values())
        return layer.experts

    for experts in LocalGroup(2).run(work):
        assert_marked(experts.float())
        assert_marked(copy.deepcopy(experts))
        state = {name: t.clone() for name, t in experts.state_dict().items()}
        experts.load_state_dict(state, assign=True)
        assert_marked(experts)
        assert_marked(experts.to("meta").to_empty(device="cpu"))


def assert_marked(experts):
    assert isinstance(experts, Experts)
    assert [p.expert_ranks for p in experts.parameters()] == [(0, 1)] * 2
    assert experts.home_experts in {(0, 1, 2, 3), (4, 5, 6, 7)}


def test_gradients_of_one_process_without_torch_distributed():
    assert not dist.is_initialized()
    example = Example([12])
    layer = example.layer(Balancer("alone", experts=8))
    layer(example.inputs[0]).backward(example.gradients[0])
    before = [p.grad.clone() for p in layer.parameters()]
    parallel.average_expert_gradients(layer)
    norm = parallel.clip_grad_norm(layer, math.inf)
    assert_close(norm, torch.nn.utils.get_total_norm(before))
    for parameter, gradient in zip(layer.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)
