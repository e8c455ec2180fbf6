"""The layer on a GPU: one rank over NCCL with backward, several ranks in one process without."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dense import Example, assert_close, dense
from microbatches import counted

from ultraep import BalancedMoE, Balancer, LocalGroup, PlanMismatch
from ultraep.microbatch import Layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
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


def test_ranks_at_different_places_raise():
    def work(comm):
        balancer = Balancer(comm, experts=8)
        ids = torch.arange(16, device=CUDA).reshape(8, 2) % 8
        microbatch = balancer.begin(Layer(), ids)
        assert microbatch.count().is_cuda
        with pytest.raises(PlanMismatch) as caught:
            counted(balancer, ids) if comm.rank else microbatch.plan()
        return str(caught.value)

    assert (
        LocalGroup(2).run(work)
        == [
            "ranks are at different places of the program: "
            "ranks [0] are at the plan of layer 0 (step 1); "
            "ranks [1] are at the loads of layer 0 (step 2)"
        ]
        * 2
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_several_ranks_in_one_process_agree_with_the_dense_twin(dtype):
    """Forward only: autograd runs all backward work of one GPU in one thread."""
    example = Example(tokens=[30, 20, 0, 40], dtype=dtype)

    def work(comm):
        balancer = Balancer._with_settings(comm, experts=example.experts, relay="chain")
        layer = example.layer(balancer, device=CUDA)
        with torch.no_grad():
            y = layer(example.inputs[comm.rank].to(CUDA))
        plane = balancer.plane("cuda")
        assert plane.name == "messages"  # ranks that are threads map nothing
        assert plane.kernels is not None  # the kernels did it
        assert layer.last_plan.num_replicas > 0
        return y.cpu()

    outputs = LocalGroup(4).run(work)
    tolerance = {torch.float32: 1e-5}.get(dtype)  # other kernels than on the CPU
    assert_close(torch.cat(outputs), dense(example).output, tolerance=tolerance)


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
