"""Training with a layer: checkpointing, accumulation, frozen weights, optimizers, states."""

import copy
import gc
import io
from contextlib import ExitStack

import pytest
import torch
from dense import (
    EXPERT_NAMES,
    Example,
    assert_close,
    assert_same_tensors,
    dense,
    gradients_of,
    on_every_rank,
    with_network,
)
from torch.autograd.forward_ad import dual_level, make_dual

from ultraep import Balancer, ConfigError, LocalGroup, PlanMismatch, UltraEPError
from ultraep.runtime import flight

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS = 8


def train_once(layer, x, gradient):
    layer(x).backward(gradient)
    assert layer.last_plan.num_replicas > 0
    return gradients_of(layer, x)


def test_without_gradients():
    def work(layer, x, gradient):
        plain = layer(x)
        with torch.no_grad():
            quiet = layer(x)
        with torch.inference_mode():
            quietest = layer(x)
        assert plain.requires_grad
        assert not quiet.requires_grad
        assert quietest.is_inference()
        assert torch.equal(plain, quiet)
        assert torch.equal(plain, quietest)
        assert layer.balancer.stats()["gradients_bytes_sent"] == 0

    on_every_rank(Example([30] * 4), work)


@pytest.mark.parametrize(
    "trained", [{"router.weight"}, set(), *({f"experts.{name}"} for name in EXPERT_NAMES)], ids=str
)
def test_frozen_parameters_get_no_gradients(trained):
    def work(layer, x, gradient):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in trained)
        gradients = train_once(layer, x, gradient)
        if not any(parameter.requires_grad for parameter in layer.experts.parameters()):
            assert layer.balancer.stats()["gradients_bytes_sent"] == 0
        return gradients

    example = Example([30] * 4, bias=True)
    results, expected = on_every_rank(example, work), dense(example).gradients
    assert all(gradients.keys() == {"x", *trained} for gradients in results)
    for name in results[0]:
        parts = [gradients[name] for gradients in results]
        total = sum(parts) if name == "router.weight" else torch.cat(parts)
        assert_close(total, expected[name], name)


def after_inference_mode(layer, x, gradient):
    with torch.inference_mode():
        layer(x)


def after_a_second_backward(layer, x, gradient):
    y = layer(x)
    y.backward(gradient)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(gradient)


def after_writing_weights_before_backward(layer, x, gradient):
    y, weight = layer(x), layer.experts.down_proj
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(gradient)
    with torch.no_grad():
        weight.div_(2)


@pytest.mark.parametrize(
    "before", [after_inference_mode, after_a_second_backward, after_writing_weights_before_backward]
)
def test_the_next_step_has_the_right_gradients(before):
    def work(layer, x, gradient):
        before(layer, x, gradient)
        x.grad = None
        layer.zero_grad()
        return train_once(layer, x, gradient)

    example = Example([30] * 4)
    assert_same_tensors(on_every_rank(example, work), on_every_rank(example, train_once))


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast(backward_inside):
    def work(layer, x, gradient):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            assert y.dtype == torch.bfloat16
            if backward_inside:
                y.backward(gradient.bfloat16())
        if not backward_inside:
            y.backward(gradient.bfloat16())
        assert layer.last_plan.num_replicas > 0
        gradients = gradients_of(layer, x)
        assert all(g.dtype == torch.float32 for g in gradients.values())
        return y.detach().float(), gradients

    example = Example([30] * 4, dtype=torch.float32, shared_ffn=4, bias=True)
    results, expected = on_every_rank(example, work), dense(example)
    assert_close(torch.cat([y for y, _ in results]), expected.output, tolerance=0.03)
    for name in ("x", "experts.down_proj", "experts.gate_up_proj", "experts.down_bias"):
        actual = torch.cat([gradients[name] for _, gradients in results])
        assert_close(actual, expected.gradients[name], name, tolerance=0.03)


def test_autocast_does_not_change_the_chosen_experts():
    def work(layer, x, gradient):
        layer(x)
        plain = layer.last_plan
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert layer.last_plan == plain

    on_every_rank(Example([100] * 2, dtype=torch.float32, skew=0.1), work)


def test_two_backward_passes_double_the_gradients():
    def work(layer, x, gradient):
        y = layer(x)
        y.backward(gradient, retain_graph=True)
        y.backward(gradient)
        return gradients_of(layer, x)

    example = Example([30] * 4, bias=True)
    results, expected = on_every_rank(example, work), dense(example).gradients
    for name in ("x", "experts.gate_up_proj", "experts.down_bias"):
        assert_close(torch.cat([r[name] for r in results]), 2 * expected[name])


@pytest.mark.parametrize("frozen", [False, True])
def test_second_derivatives_are_refused(frozen):
    def work(layer, x, gradient):
        layer.experts.requires_grad_(not frozen)
        y = layer(x)
        (first,) = torch.autograd.grad(y, x, gradient, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            first.square().sum().backward()
        return first.detach()

    example = Example([30] * 2)
    first = torch.cat(on_every_rank(example, work))
    assert_close(first, dense(example).gradients["x"])


DIFFERENCES = {  # of one rank; they change a layer and its input, or enter a context
    "no_grad": lambda layer, x, stack: stack.enter_context(torch.no_grad()),
    "frozen experts": lambda layer, x, stack: layer.experts.requires_grad_(False),
    "detached input": lambda layer, x, stack: x.requires_grad_(False),
    "bfloat16 weights": lambda layer, x, stack: layer.experts.bfloat16(),
    **{
        f"autocast to {dtype}": lambda layer, x, stack, dtype=dtype: stack.enter_context(
            torch.autocast("cpu", dtype)
        )
        for dtype in (torch.bfloat16, torch.float16)
    },
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_that_disagree_about_a_pass_are_named(difference):
    """Their backward passes would exchange different messages."""

    def work(layer, x, gradient):
        with ExitStack() as stack:
            if layer.balancer.rank == 1:
                DIFFERENCES[difference](layer, x, stack)
            with pytest.raises(PlanMismatch, match=r"ranks \[0, 2, 3\] have .*ranks \[1\]"):
                layer(x)

    on_every_rank(Example([30] * 4, dtype=torch.float32), work)


def tensors_alive():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_memory_stays_constant(monkeypatch):
    monkeypatch.setattr(flight, "PASSES", 20)  # the warm-up fills the flight recorder
    example = Example([12] * 2, hidden=6, ffn=4)
    group = LocalGroup(2)

    def build(comm):
        layer = example.layer(Balancer(comm, experts=EXPERTS))
        return layer, torch.optim.Adam(layer.parameters(), lr=1e-3)

    built = group.run(build)

    def steps(count):
        def work(comm):
            layer, optimizer = built[comm.rank]
            for step in range(count):
                x = example.inputs[comm.rank].clone().requires_grad_()
                x.data[:, 0] = (-1) ** step  # plans change
                layer(x).backward(example.gradients[comm.rank])
                optimizer.step()
                optimizer.zero_grad()
            return layer.last_plan.num_replicas

        assert group.run(work)[0] > 0
        pools = [layer.balancer.plane("cpu").nbytes for layer, _ in built]
        return pools, tensors_alive(), len(gc.get_objects())

    steps(15)
    gc.collect()
    gc.disable()  # so that reference cycles count as leaks
    try:
        pools, tensors, objects = steps(15)
        pools_after, tensors_after, objects_after = steps(60)
    finally:
        gc.enable()
    assert pools_after == pools
    assert tensors_after <= tensors + 2
    assert objects_after <= objects + 100


def test_states_and_parameters_hold_no_replicas():
    def work(layer, x, gradient):
        train_once(layer, x, gradient)
        shapes = {name: list(tensor.shape) for name, tensor in layer.state_dict().items()}
        assert shapes == {
            "router.weight": [8, 16],
            "experts.gate_up_proj": [2, 24, 16],
            "experts.down_proj": [2, 16, 12],
        }
        assert {name for name, _ in layer.named_parameters()} == shapes.keys()
        assert not dict(layer.named_buffers())
        return sum(p.numel() for p in layer.experts.parameters())

    example = Example([30] * 4)
    experts = [t for name, t in example.state.items() if name.startswith("experts.")]
    assert sum(on_every_rank(example, work, slots=2)) == sum(t.numel() for t in experts)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"slots": 0}),
        (2, {"slots": 2}),
        (4, {"slots": 1}),
        (4, {"slots": 2, "experts": [3, 3, 3, 1, 0, 1, 0, 2]}),
        (4, {"slots": 1, "experts": [3, 3, 3, 1, 1, 1, 0, 0]}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::ultraep.NothingToBalance")
def test_full_states_load_on_any_number_of_ranks_and_slots(ranks, options):
    example = Example([12] * 4, bias=True, router_bias=True, shared_ffn=4)

    def work(comm):
        layer = example.layer(Balancer._with_settings(comm, **{"experts": EXPERTS} | options))
        state = {name: tensor.clone() for name, tensor in layer.full_state_dict().items()}
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        layer.load_full_state_dict(state)
        parts = torch.cat(example.inputs).chunk(comm.size)
        return state, layer(parts[comm.rank]).detach()

    results = LocalGroup(ranks).run(work)
    for state, _ in results:
        assert state.keys() == example.state.keys()
        for name, tensor in example.state.items():
            assert torch.equal(state[name], tensor), name
            assert not state[name].requires_grad
    assert_close(torch.cat([y for _, y in results]), dense(example).output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("router.weight"), r"router\.weight"),
        (lambda state: state.update({"experts.stranger": torch.zeros(8, 1)}), "stranger"),
        (lambda state: state.update(Example([12], experts=4).state), "but the layer has 8"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, message):
    example = Example([12])
    layer, state = example.layer(Balancer("alone", experts=EXPERTS)), dict(example.state)
    change(state)
    with pytest.raises((RuntimeError, UltraEPError), match=message):
        layer.load_full_state_dict(state)


def test_copied_modules_share_the_balancer():
    example = Example([30] * 2)

    def work(layer, x, gradient):
        averaged = torch.optim.swa_utils.AveragedModel(layer)
        twin, shallow = copy.deepcopy(layer), copy.copy(layer)
        layer.load_full_state_dict({name: 2 * t for name, t in example.state.items()})
        assert averaged.module.balancer is twin.balancer is shallow.balancer is layer.balancer
        return averaged(x).detach(), twin(x).detach()

    for outputs in zip(*on_every_rank(example, work), strict=True):
        assert_close(torch.cat(outputs), dense(example).output)


def test_a_balancer_cannot_be_saved():
    layer = Example([3]).layer(Balancer("alone", experts=EXPERTS))
    with pytest.raises(
        ConfigError, match=r"a Balancer .* cannot be pickled: save the state_dict\(\)"
    ):
        torch.save(layer, io.BytesIO())
    torch.save(layer.full_state_dict(), io.BytesIO())


# torch.func transforms and forward mode, on both data planes


def forward_mode(layer, x):
    """Refused with and without a tangent, so that all ranks raise the same error."""
    with dual_level():
        with pytest.raises(ConfigError, match=r"forward_ad\.dual_level\(\)"):
            layer(x)
        return layer(make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    "dual level": forward_mode,
    "vmap": lambda layer, x: torch.vmap(layer)(x[None]),
    "parameters": lambda layer, x: torch.func.grad(
        lambda own: torch.func.functional_call(layer, own, (x,)).sum()
    )(dict(layer.named_parameters())),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # jvp, by itself
@pytest.mark.parametrize("own_network", [False, True], ids=["experts", "network"])
@pytest.mark.parametrize("data_plane", ["messages", "mapped"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused(name, data_plane, own_network):
    example = Example([5], dtype=torch.float32)
    balancer = Balancer("alone", experts=example.experts, data_plane=data_plane)
    layer = example.layer(balancer)
    if own_network:
        layer = with_network(layer)
    x = example.inputs[0]
    with pytest.raises(ConfigError, match=r"inside a torch\.func transform.*backward\(\)"):
        TRANSFORMS[name](layer, x)
    assert torch.func.functional_call(layer, {}, (x,)).shape == x.shape
