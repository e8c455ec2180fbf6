"""Both data planes on a GPU: one rank in this process, and two processes that share the device.

Results of the mapped plane are compared with messages, with the dense twin, and with torch.
"""

import warnings
from datetime import timedelta

import cases  # noqa: F401  registers a policy, also in processes
import pytest
import torch
import torch.distributed as dist
from dense import Example, assert_close, dense, network
from gpu_ranks import CUDA, PATIENCE, PRECISION, assert_alike, mapped, messages, one_pass
from torch import nn

from ultraep import BalancedMoE, Balancer, ConfigError, ExpertsFrom, LoadError, Routing, read_trace
from ultraep.trace.schema import BACKWARD, FORWARD
from ultraep_tools.replay import differing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance"),  # one rank over NCCL
]
LONG = 600.0  # seconds; only what hangs needs them
EXPERTS, HIDDEN, FFN, TOP_K = 8, 64, 48, 2
PLANES = ["mapped", "messages"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STAGES = {*FORWARD, *BACKWARD} - {"recompute"}
MILLISECOND = 1_700_000  # cycles, about


def example_of(tokens, dtype=torch.float32, **options):
    sizes = {"experts": EXPERTS, "hidden": HIDDEN, "ffn": FFN, "top_k": TOP_K}
    return Example(tokens=tokens, dtype=dtype, **sizes | options)


def alone(plane, example, **options):
    balancer = Balancer._with_settings(
        "alone", experts=example.experts, data_plane=plane, **options
    )
    return example.layer(balancer, device=CUDA)


def custom_experts_of(layer):
    experts = ExpertsFrom(network, layer.experts.bundle, list(layer.experts.home_experts))
    return BalancedMoE(layer.router, experts, balancer=layer.balancer)


class Precise(nn.Module):
    """A router whose gates have this dtype."""

    def __init__(self, router, dtype):
        super().__init__()
        self.router, self.dtype = router, dtype

    def forward(self, tokens):
        ids, gates, logits = self.router(tokens)
        return Routing(ids, gates.to(self.dtype), logits)


# One rank that is the whole group.


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_both_planes_agree_with_the_dense_twin(dtype):
    example = example_of([40], dtype, bias=True)
    expected = dense(example)
    layers = {plane: alone(plane, example) for plane in PLANES}
    actual = {plane: one_pass(layer, example) for plane, layer in layers.items()}
    assert [layer.balancer.plane("cuda").name for layer in layers.values()] == PLANES
    assert_alike(actual["mapped"], actual["messages"])
    assert_alike(actual["mapped"], {"y": expected.output, **expected.gradients})


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("gates", [torch.float64, torch.bfloat16], ids=str)
def test_gates_of_another_type_than_the_rows(plane, gates):
    example = example_of([40], bias=True)
    layer = alone(plane, example)
    expected = one_pass(layer, example)
    layer.router = Precise(layer.router, gates)
    actual = one_pass(layer, example)
    actual["router.weight"] = actual.pop("router.router.weight")
    assert_alike(actual, expected, 1e-2 if gates == torch.bfloat16 else 1e-5)


def test_stages_are_timed_on_the_device():
    example = example_of([40])
    layer, x = alone("mapped", example), example.inputs[0].to(CUDA)
    layer(x)
    layer.balancer.reset_stats()
    for _ in range(96):
        torch.cuda._sleep(20 * MILLISECOND)  # before the first stage: belongs to none
        layer(x)
    stats = layer.balancer.stats()
    assert stats["microbatches"] == 96
    assert 1 <= stats["timed"] <= 6
    assert set(stats["seconds"]) == set(FORWARD)
    assert sum(stats["seconds"].values()) < 96 * 0.01
    at_work = set(FORWARD) - {"verify", "replicate"}  # one rank has nothing to do there
    assert all(stats["seconds"][stage] > 0 for stage in at_work)


# Graphs of one rank.


class Captured:
    """A pass in a graph; tokens and gradients keep their memory."""

    def __init__(self, layer, example, rank=0):
        self.x = example.inputs[rank].to(CUDA, copy=True).requires_grad_()
        self.gradient = example.gradients[rank].to(CUDA)
        self.layer, self.graph = layer, torch.cuda.CUDAGraph()

    def eager(self):
        y = self.layer(self.x)
        return [y, *torch.autograd.grad(y, [self.x, *self.layer.parameters()], self.gradient)]

    def capture(self):
        with torch.cuda.graph(self.graph):
            self.static = self.eager()

    def replay(self):
        self.graph.replay()
        self.layer.balancer.check()
        return [tensor.detach().clone() for tensor in self.static]

    def draw(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.x.copy_(torch.randn(self.x.shape, generator=generator))
            self.x[:, 0] = 1.0  # what the skew of the router looks at


def assert_replays(captured, launched):
    """Check that replays with other tokens give the same as eager passes."""
    for seed in range(3):
        for one in (captured, launched):
            one.draw(seed)
        replayed = captured.replay()
        for actual, expected in zip(replayed, launched.eager(), strict=True):
            assert_close(actual, expected.detach(), "", PRECISION[expected.dtype])
        assert replayed[0].any()


def in_a_graph(act, *args, **options):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        act(*args, **options)


def test_memory_does_not_grow_in_a_capture():
    example = example_of([90])
    layer = alone("mapped", example)
    small = Captured(layer, example_of([20]))
    small.eager()
    small.capture()
    expected = [tensor.cpu() for tensor in small.replay()]
    large = example.inputs[0].to(CUDA)
    with pytest.raises(LoadError, match=r"90 tokens, but there is memory for 20"):
        in_a_graph(layer, large)
    assert layer(large).isfinite().all()  # outside of a graph it does
    again = [tensor.cpu() for tensor in small.replay()]
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


def test_what_a_capture_refuses():
    """A policy of the host, rows wider than any region, and the choice of a plane."""
    example, x = example_of([40]), torch.randn(40, HIDDEN, device=CUDA)
    layer = alone("mapped", example)
    layer(x, policy="registered")
    with pytest.raises(ConfigError, match="'registered' plans on the host and cannot be captured"):
        in_a_graph(layer, x, policy="registered")
    wide = example_of([40], hidden=2 * HIDDEN).layer(layer.balancer, device=CUDA)
    with pytest.raises(LoadError, match="in a graph"):
        in_a_graph(wide, torch.randn(40, 2 * HIDDEN, device=CUDA))
    unused = alone("auto", example)
    with pytest.raises(ConfigError, match="while a graph is captured"):
        in_a_graph(unused, x)
    for other in (layer, wide, unused):
        width = other.router.weight.shape[1]
        assert other(torch.randn(40, width, device=CUDA)).isfinite().all()


# Two processes on one device.


def both_planes(rank, group):
    warnings.simplefilter("default")  # torch's symmetric memory warns
    balancer = Balancer(group, experts=EXPERTS, timeout=PATIENCE)
    chosen = balancer.plane(CUDA).name
    balancer.close()
    replicas = [
        compare_planes(rank, group, dtype, cast)
        for dtype, cast in (
            (torch.float32, False),
            (torch.bfloat16, False),
            (torch.float32, True),  # under autocast
        )
    ]
    return [*replicas, chosen]


def compare_planes(rank, group, dtype, cast):
    example = example_of([60, 50], dtype, skew=3.0)
    actual, replicas = [], []
    for make in (mapped, messages):
        balancer = make(group, experts=EXPERTS, slots=2, relay="chain")
        layer, passes = example.layer(balancer, device=CUDA), {}
        for policy in (None, "registered"):
            passes[policy] = one_pass(layer, example, rank, cast=cast, policy=policy)
            replicas.append(layer.last_plan.to_host().num_replicas)
        passes["custom experts"] = one_pass(
            custom_experts_of(layer), example, rank, owner=layer, cast=cast
        )
        actual.append(passes)
        balancer.close()
    by_memory, by_messages = actual
    tolerance = PRECISION[torch.bfloat16] if cast else None
    assert by_memory[None]["y"].dtype == (torch.bfloat16 if cast else dtype)
    for name, passed in by_memory.items():
        assert_alike(passed, by_messages[name], tolerance)
        assert_alike(passed, by_memory[None], tolerance)
    return replicas


def test_two_processes_get_the_same_by_memory_and_by_messages(two):
    """With experts and with a network, with a policy of the device and one of the host."""
    one, other = two.run(2, both_planes, timeout=LONG)
    assert one == other
    assert one.pop() == "mapped"
    for replicas in one:
        assert min(replicas) > 0
        assert replicas[:2] == replicas[2:]


def watched(rank, group, folder):
    example = example_of([60, 50], skew=3.0)
    balancer = mapped(group, experts=EXPERTS, slots=2, relay="chain", record=folder)
    layers = [example.layer(balancer, device=CUDA) for _ in range(2)]
    balancer.record_step(0)
    one_pass(layers[0], example, rank)  # compiles
    balancer.reset_stats()
    plans = []
    for step in (10, 20, 30):
        balancer.record_step(step)
        torch.cuda._sleep(50 * MILLISECOND)
        x = example.inputs[rank].to(CUDA, copy=True).requires_grad_()
        for layer in layers:
            x = x + layer(x)
            plans.append(layer.last_plan)
        x.sum().backward()
    stats = balancer.stats()
    balancer.check()
    balancer.close()
    actual = [plan.to_host() for plan in plans]
    return [plan.digest() for plan in actual], sum(plan.num_replicas for plan in actual), stats


def test_stats_and_traces_of_two_processes(two, tmp_path):
    actual = two.run(2, watched, tmp_path / "run", timeout=LONG)
    (digests, replicas, stats), (others, *_) = actual
    assert digests == others
    assert replicas > 0
    for *_, own in actual:
        assert (own["microbatches"], own["copies"]) == (6, replicas)
        assert set(own["seconds"]) == STAGES
        assert all(own["seconds"][stage] > 0 for stage in STAGES - {"verify"})
        assert own["imbalance_after"] == stats["imbalance_after"] < stats["imbalance_before"]
    for what in ("weights", "gradients"):
        assert sum(own[f"{what}_copies_sent"] for *_, own in actual) == replicas
    trace = read_trace(tmp_path / "run")
    assert differing(trace) == []
    assert [trace.plan(record).digest() for record in range(1, 7)] == digests
    assert trace.step.tolist() == [0, 10, 10, 20, 20, 30, 30]
    assert trace.layer.tolist() == [0, 0, 1, 0, 1, 0, 1]
    used = trace.seconds.sum(axis=(0, 1)) > 0
    stages = {name for name, there in zip(trace.header.stages, used, strict=True) if there}
    assert STAGES - {"verify"} <= stages
    assert (trace.began < trace.back_began).all()


# One rank over NCCL, and the weights that a graph quantises


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
