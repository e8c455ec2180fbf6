"""Training with DDP and FSDP2 equals training in one process; wrappers that damage experts fail."""

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

CASES = [
    ("ddp", 2, 2),
    ("ddp", 3, 3),  # one rank has no experts
    ("ddp", 2, 1),  # every rank has all experts
    ("ddp", 4, 2),  # two groups with the same experts
    ("fsdp", 4, 2),
    ("fsdp, experts too", 4, 2),
    ("fsdp, experts too", 2, 2),  # no other rank has the same
]


def train(rank, group, wrapper, ep):
    training = Training(wrapper, ep)
    training.backward()
    homes = list(training.bare.moe.experts.home_experts)
    expected, gradients = reference(3)
    for name, gradient in training.full_gradients().items():
        right = gradients[name][homes] if ".experts." in name else gradients[name]
        assert_close(gradient, right, name)
    assert_same_history(training.steps(3), expected)
    assert ep == 1 or training.bare.moe.last_plan.num_replicas > 0


@pytest.mark.parametrize(("wrapper", "ranks", "ep"), CASES, ids=str)
def test_gradients_norms_and_losses(wrapper, ranks, ep):
    shared_pool().run(ranks, train, wrapper, ep)


WRAPPERS = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fsdp2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))),
    "distribute_module": lambda model: distribute_module(model, init_device_mesh("cpu", (2,))),
}
UNEVEN = [0, 0, 0, 0, 0, 1, 1, 1]
TREATED = "would treat 'moe.experts' as the same on ranks [0, 1], "
ONE_DTENSOR = "'gate_up_proj' of home experts would become one DTensor of ranks [0, 1], "
DDP, FSDP1 = f"DistributedDataParallel {TREATED}", f"FullyShardedDataParallel {TREATED}"


def refused(rank, group, wrapper, experts, frozen, message):
    warnings.filterwarnings("ignore", "FSDP will not all-gather")
    model = balanced(group, experts)
    model.moe.experts.requires_grad_(not frozen)
    before = copy.deepcopy(model.moe.experts)
    with pytest.raises(ConfigError) as error:
        WRAPPERS[wrapper](model)
    assert message in str(error.value)
    assert "but each of ranks [0, 1] has other experts: exclude them" in str(error.value)
    if wrapper in ("ddp", "fsdp2"):  # the others write first
        assert torch.equal(model.moe.experts.gate_up_proj, before.gate_up_proj)


@pytest.mark.parametrize(
    ("wrapper", "experts", "frozen", "message"),
    [
        ("ddp", 8, False, DDP),
        ("ddp", 8, True, DDP),  # it averages nothing, but it would overwrite the experts
        ("ddp", UNEVEN, False, DDP),
        ("fsdp1", 8, False, FSDP1),
        ("fsdp2", 8, False, ONE_DTENSOR),
        ("fsdp2", UNEVEN, False, ONE_DTENSOR),
        ("distribute_module", 8, False, ONE_DTENSOR),
    ],
)
def test_wrappers_that_treat_experts_as_equal_are_refused(wrapper, experts, frozen, message):
    shared_pool().run(2, refused, wrapper, experts, frozen, message)


def all_experts_in_ddp(rank, group):
    experts, _ = grid(1)
    wrapped = DistributedDataParallel(balanced(experts))
    wrapped(torch.ones(3, 16, dtype=torch.float64)).sum().backward()
    assert wrapped.module.moe.experts.down_proj.grad is not None


def test_plain_ddp_is_accepted_if_every_rank_has_all_experts():
    shared_pool().run(2, all_experts_in_ddp)


def wrong_dp_replicas(rank, group):
    training = Training("ddp", 2)
    training.model(training.x).sum().backward()
    message = r"ranks \[0, 1\] belong to one expert-parallel group, ranks \[0, 1\]"
    with pytest.raises(ConfigError, match=message):
        parallel.average_expert_gradients(training.model, group)
    training = Training("ddp", 1)
    training.model(training.x).sum().backward()
    with pytest.raises(ConfigError, match="the job has 2 ranks, but the experts are spread over 1"):
        parallel.average_expert_gradients(training.model)


def test_wrong_dp_replicas_are_refused():
    shared_pool().run(2, wrong_dp_replicas)


def test_expert_parameters_carry_their_ranks():
    example = Example([4] * 2, shared_ffn=4)

    def work(comm):
        layer = example.layer(Balancer(comm, experts=8))
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
