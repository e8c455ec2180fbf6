"""Bundles of raw bytes: every quantised format travels bit by bit, on every plane.

The network of these tests dequantises the tensors of an expert and multiplies row by row, so that
the output of a row has the same bits wherever it is computed.

Shapes: E experts, N and K of a weight, D model width, F hidden width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from dense import FixedRouter
from mapped_ranks import mapped_rank
from microbatches import planned
from ranks import TRANSPORTS, everywhere, shared_pool

from ultraep import (
    BalancedMoE,
    Balancer,
    ConfigError,
    ExpertsFrom,
    LocalGroup,
    PlanMismatch,
    gather_experts,
)
from ultraep.backends.triton.device import interpreted
from ultraep.bundle import Layout, as_bytes

EXPERTS, D, F, SEED = 6, 32, 64, 7
SHAPES = {"up": (F, D), "down": (D, F)}  # N, K
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Form:
    """A format: how a test draws the tensors of one weight, and dequantises one expert's."""

    draw: Callable[[torch.Generator, int, int], Tensors]
    dequantise: Callable[..., torch.Tensor]


def e4m3(random: torch.Generator, *shape: int) -> torch.Tensor:
    """Return random codes; every code but NaN occurs."""
    codes = torch.randint(0, 0x7F, (EXPERTS, *shape), generator=random, dtype=torch.uint8)
    signs = torch.randint(0, 2, codes.shape, generator=random, dtype=torch.uint8)
    return (codes | signs << 7).view(E4M3)


def codes(random: torch.Generator, *shape: int, least: int = 0, end: int = 256) -> torch.Tensor:
    return torch.randint(least, end, (EXPERTS, *shape), generator=random, dtype=torch.uint8)


def floats(random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.rand(EXPERTS, *shape, generator=random) / 64 + 2**-10


def e8m0(random: torch.Generator, *shape: int) -> torch.Tensor:
    return codes(random, *shape, least=118, end=124)


def spread(scales: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return one scale for each number, from one for each group of height x width."""
    return scales.double().repeat_interleave(height, 0).repeat_interleave(width, 1)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the two codes of every byte, the low one first."""
    packed = data.view(torch.uint8).long()
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def e2m1(data: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(FP4 + [-value for value in FP4], dtype=torch.float64)
    return values[nibbles(data)]


def powers(scales: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scales.view(torch.uint8).double() - 127)


FORMS = {
    "FP8, block scales": Form(
        lambda g, n, k: {"data": e4m3(g, n, k), "scales": floats(g, n // 16, k // 16)},
        lambda data, scales: data.double() * spread(scales, 16, 16),
    ),
    "FP8, row scales": Form(
        lambda g, n, k: {"data": e4m3(g, n, k), "scales": floats(g, n, 1)},
        lambda data, scales: data.double() * scales,
    ),
    "FP8, tensor scale": Form(
        lambda g, n, k: {"data": e4m3(g, n, k), "scales": floats(g)},
        lambda data, scales: data.double() * scales,
    ),
    "MXFP8": Form(
        lambda g, n, k: {"data": e4m3(g, n, k), "scales": e8m0(g, n, k // 32).view(E8M0)},
        lambda data, scales: data.double() * spread(powers(scales), 1, 32),
    ),
    "MXFP4": Form(
        lambda g, n, k: {"data": codes(g, n, k // 32, 16), "scales": e8m0(g, n, k // 32)},
        lambda data, scales: e2m1(data).flatten(1) * spread(powers(scales), 1, 32),
    ),
    "NVFP4": Form(
        lambda g, n, k: {
            "data": codes(g, n, k // 2).view(torch.float4_e2m1fn_x2),
            "scales": e4m3(g, n, k // 16),
            "global": floats(g),
        },
        lambda data, scales, scale: e2m1(data) * spread(scales, 1, 16) * scale / 64,
    ),
    "INT8": Form(
        lambda g, n, k: {"data": codes(g, n, k).view(torch.int8), "scales": floats(g, n, 1)},
        lambda data, scales: data.double() * scales / 64,
    ),
    "INT4": Form(
        lambda g, n, k: {
            "data": codes(g, n, k // 2),
            "scales": floats(g, n, k // 32).to(torch.bfloat16),
            "zeros": codes(g, n, k // 32, end=16),
        },
        lambda data, scales, zeros: (nibbles(data) - spread(zeros, 1, 32)) * spread(scales, 1, 32),
    ),
}


def all_experts(form: Form) -> Tensors:
    """Return the tensors of all experts, the same on every rank.

    The bias is trainable; all experts share the factor; the bytes of `odd` begin anywhere.
    """
    random = torch.Generator().manual_seed(SEED)
    drawn = {
        f"{weight}_{part}": tensor
        for weight, shape in SHAPES.items()
        for part, tensor in form.draw(random, *shape).items()
    }
    bias = torch.randn(EXPERTS, D, generator=random, dtype=torch.float64)
    factor = torch.rand(D, generator=random, dtype=torch.float64)
    return drawn | {"odd": codes(random, 7), "bias": bias, "factor": factor.expand(EXPERTS, D)}


def network_of(form: Form) -> Any:

    def network(rows: torch.Tensor, counts: list[int], tensors: Tensors) -> torch.Tensor:
        outputs = []
        for index, part in enumerate(rows.split(counts)):
            up, down = (
                form.dequantise(*(t[index] for n, t in tensors.items() if n.startswith(weight)))
                for weight in SHAPES
            )
            for row in part:
                hidden = (up @ row.clone()).clamp(min=0) / F
                outputs.append(
                    down @ hidden / F * tensors["factor"][index] + tensors["bias"][index]
                )
        return torch.stack(outputs)

    return network


def routing(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 + rank)
    hot = torch.tensor([0, 0, 0, 1, 1, 2, 3, 4, 5])
    ids = hot[torch.randint(0, len(hot), (10 + 3 * rank, 2), generator=random)]
    gates = torch.rand(ids.shape, generator=random, dtype=torch.float64)
    return ids, gates, torch.randn(len(ids), D, generator=random, dtype=torch.float64)


def layer_of(balancer: Balancer, form: Form) -> tuple[BalancedMoE, Tensors]:
    homes = balancer.topology.home_experts(balancer.rank).tolist()
    bundle = {
        name: as_bytes(tensor)[homes].view(tensor.dtype)
        for name, tensor in all_experts(form).items()
    }
    bundle["factor"] = bundle["factor"][0].expand(len(homes), D)
    bundle["bias"].requires_grad_()
    ids, gates, _ = routing(balancer.rank)
    experts = ExpertsFrom(network_of(form), bundle, homes)
    return BalancedMoE(FixedRouter(ids, gates), experts, balancer=balancer), bundle


def assert_replicas_are_their_homes(balancer: Balancer, form: Form, bundle: Tensors) -> None:
    ids, everywhere = routing(balancer.rank)[0], all_experts(form)
    microbatch, plan = planned(balancer, ids, bundle, layer=balancer.register_layer())
    placed = plan.to_host().replicas.tolist()
    assert placed
    with microbatch.replicate() as replicas:
        slots = replicas.tensors()
        for expert, host, slot in placed:
            for name, tensor in everywhere.items() if host == balancer.rank else ():
                assert slots[name].dtype == tensor.dtype
                assert torch.equal(as_bytes(slots[name][slot]), as_bytes(tensor[expert])), name


def one_pass(balancer: Balancer, name: str, policy: str) -> Tensors:
    form = FORMS[name]
    layer, bundle = layer_of(balancer, form)
    if policy != "none":
        assert_replicas_are_their_homes(balancer, form, bundle)
    x = routing(balancer.rank)[2].requires_grad_()
    y = layer(x, policy=policy)
    y.square().sum().backward()
    assert (layer.last_plan.to_host().num_replicas > 0) == (policy != "none")
    router: Any = layer.router
    gradients = {"x": x.grad, "gates": router.weight.grad, "bias": bundle["bias"].grad}
    return {"y": y.detach(), **gradients}


def on_messages(comm: Any, names: list[str], policy: str) -> list[Tensors]:
    return [one_pass(Balancer(comm, experts=EXPERTS), name, policy) for name in names]


def on_mapped(rank: int, group: Any, names: list[str]) -> list[Tensors]:
    results = []
    for name in names:
        with mapped_rank(group, experts=EXPERTS, capacity=80) as balancer:
            results.append(one_pass(balancer, name, "ultraep"))
    return results


def assert_as_unbalanced(results: list[list[Tensors]], names: list[str]) -> None:
    """Compare with the unbalanced run: outputs bit by bit, gradients up to the order of sums."""
    plain = LocalGroup(2).run(lambda comm: on_messages(comm, names, "none"))
    for balanced, unbalanced in zip(results, plain, strict=True):
        for name, actual, expected in zip(names, balanced, unbalanced, strict=True):
            assert torch.equal(actual["y"], expected["y"]), name
            for gradient in ("x", "gates", "bias"):
                torch.testing.assert_close(
                    actual[gradient], expected[gradient], rtol=1e-12, atol=1e-12
                )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replicas_and_outputs_of_all_formats_over_messages(transport):
    names = list(FORMS)
    assert_as_unbalanced(everywhere(transport, 2, on_messages, names, "ultraep"), names)


@pytest.mark.skipif(not interpreted(), reason="ranks are processes without GPUs")
@pytest.mark.parametrize(
    "names", [["NVFP4"], pytest.param([n for n in FORMS if n != "NVFP4"], marks=pytest.mark.slow)]
)
def test_replicas_and_outputs_on_the_mapped_plane(names):
    assert_as_unbalanced(shared_pool().run(2, on_mapped, names), names)


@pytest.mark.parametrize("dtype", ["uint4", "int4", "float4_e2m1fn_x2", "float8_e5m2fnuz"])
def test_dtypes_that_torch_cannot_copy(dtype):
    numbers = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    stack = {"w": numbers.view(getattr(torch, dtype)), "one": torch.arange(2.0)}
    layout = Layout.of(stack, 2)
    views = layout.views(layout.pack(stack, 1)[None])
    assert torch.equal(views["w"].view(torch.uint8)[0], numbers[1])
    assert views["one"].tolist() == [1.0]


def test_all_experts_are_gathered_in_every_format():
    def work(comm):
        balancer = Balancer(comm, experts=EXPERTS)
        for form in FORMS.values():
            _, bundle = layer_of(balancer, form)
            for name, tensor in all_experts(form).items():
                gathered = gather_experts(bundle[name], balancer)
                assert torch.equal(as_bytes(gathered), as_bytes(tensor)), name

    LocalGroup(2).run(work)


# Refusals


def test_ranks_with_different_formats_are_refused_before_anything_is_sent():
    def work(comm):
        balancer = Balancer(comm, experts=EXPERTS)
        layer, _ = layer_of(balancer, FORMS[["MXFP8", "FP8, row scales"][comm.rank]])
        with pytest.raises(PlanMismatch, match=r"up_scales \[64, 1\] torch.float8_e8m0fnu"):
            layer(routing(comm.rank)[2])
        assert balancer.stats()["copies"] == 0

    LocalGroup(2).run(work)


def test_quantised_tensors_that_require_gradients_are_refused():
    balancer = Balancer("alone", experts=EXPERTS)
    layer, bundle = layer_of(balancer, FORMS["FP8, tensor scale"])
    bundle["up_data"].requires_grad_()
    with pytest.raises(ConfigError, match=r"'up_data' is torch.float8_e4m3fn and requires grad"):
        layer(routing(0)[2])
    assert balancer.stats()["microbatches"] == 0
