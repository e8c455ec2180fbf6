"""The layer on a GPU: one rank over NCCL with backward, several ranks in one process without."""

import pytest
import torch
import torch.distributed as dist
from dense import Example, assert_close, dense

from ultraep import Balancer, LocalGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CUDA = torch.device("cuda")


@pytest.fixture
def nccl(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_over_nccl_agrees_with_the_dense_twin(nccl):
    example = Example(tokens=[50])
    balancer = Balancer(nccl, experts=example.experts)
    layer = example.layer(balancer, device=CUDA)
    x = example.inputs[0].to(CUDA).requires_grad_()
    y = layer(x)
    y.backward(example.gradients[0].to(CUDA))
    wanted = dense(example)
    assert_close(y.detach().cpu(), wanted.output)
    assert balancer._control is not None  # the kernels did it
    assert_close(x.grad.cpu(), wanted.gradients["x"])
    for name, parameter in layer.named_parameters():
        assert_close(parameter.grad.cpu(), wanted.gradients[name], name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_several_ranks_in_one_process_agree_with_the_dense_twin(dtype):
    """Forward only: autograd runs all backward work of one GPU in one thread."""
    example = Example(tokens=[30, 20, 0, 40], dtype=dtype)

    def work(comm):
        balancer = Balancer(experts=example.experts, communicator=comm, relay="chain")
        layer = example.layer(balancer, device=CUDA)
        with torch.no_grad():
            y = layer(example.inputs[comm.rank].to(CUDA))
        assert balancer._control is not None
        assert layer.last_plan.num_replicas > 0
        return y.cpu()

    outputs = LocalGroup(4).run(work)
    tolerance = {torch.float32: 1e-5}.get(dtype)  # other kernels than on the CPU
    assert_close(torch.cat(outputs), dense(example).output, tolerance=tolerance)
