"""The layer on a GPU: one rank over NCCL, and the weights that a graph quantises."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dense import Example, assert_close, dense

from ultraep import BalancedMoE, Balancer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance"),  # one rank over NCCL
]
CUDA = torch.device("cuda")


@pytest.fixture
def nccl(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    limit = timedelta(seconds=77)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, timeout=limit)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("data_plane", ["messages", "mapped"])
def test_one_rank_over_nccl_agrees_with_the_dense_twin(nccl, data_plane):
    example = Example(tokens=[50])
    balancer = Balancer(nccl, experts=example.experts, data_plane=data_plane)
    layer = example.layer(balancer, device=CUDA)
    x = example.inputs[0].to(CUDA).requires_grad_()
    y = layer(x)
    y.backward(example.gradients[0].to(CUDA))
    expected = dense(example)
    assert_close(y.detach().cpu(), expected.output)
    assert balancer.plane("cuda").name == data_plane
    assert_close(x.grad.cpu(), expected.gradients["x"])
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad.cpu(), expected.gradients[name], name)
    balancer.close()


def test_the_default_timeout_is_the_one_of_nccl(nccl):
    assert Balancer(nccl, experts=8).comm.timeout == 77.0
    assert Balancer(nccl, experts=8, timeout=5.0).comm.timeout == 5.0


def test_a_graph_quantises_trained_weights_and_not_frozen_ones():
    """In every replay; the memory of the codes stays, also after the first eager pass."""
    torch.manual_seed(0)
    x, stream = torch.randn(16, 64, device=CUDA), torch.cuda.Stream()
    outputs = []
    for freeze in (False, True):
        balancer = Balancer("alone", experts=8, data_plane="mapped")
        layer = BalancedMoE.swiglu(64, 32, 8, 2, balancer=balancer, quantised="fp8", device=CUDA)
        if freeze:
            layer.experts.freeze()
        with torch.no_grad(), torch.cuda.stream(stream):
            layer(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                y = layer(x)
            graph.replay()
            outputs.append(y.clone())
            if not freeze:
                layer.experts.down_proj.mul_(2)
                graph.replay()
                assert torch.equal(y, 2 * outputs[0])
        balancer.close()
    assert torch.equal(*outputs)
