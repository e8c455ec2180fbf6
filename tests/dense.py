"""The reference of all layer tests: the same layer in one process, without ranks or replicas.

`DenseMoE` is the dense twin of a `BalancedMoE`, built from its full state. `Example` draws weights,
skewed inputs and gradients of the outputs; `on_ranks` runs the layer on them, `dense` runs the
twin, and `assert_same` compares outputs and gradients.

Shapes: T tokens, K experts per token, E experts, D model width, F hidden width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, silu

import ultraep
from ultraep import BalancedMoE, Balancer, Experts, ExpertsFrom, LocalGroup, Plan

State = dict[str, torch.Tensor]
Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
EXPERT_NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


class DenseMoE(nn.Module):
    """All experts in one process; `router` replaces the router of the state."""

    def __init__(
        self,
        state: Mapping[str, torch.Tensor],
        top_k: int,
        *,
        scores: str = "softmax",
        normalize_top_k: bool = True,
        router: Router | None = None,
        activation: str = "swiglu",
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.top_k, self.scores, self.normalize = top_k, scores, normalize_top_k
        self.replaced = router
        self.weights = nn.ParameterDict(
            {_flat(name): nn.Parameter(tensor.clone()) for name, tensor in state.items()}
        )

    def get(self, name: str) -> torch.Tensor | None:
        return self.weights.get(_flat(name))

    def gradient(self, name: str) -> torch.Tensor | None:
        weight = self.get(name)
        return None if weight is None else weight.grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        ids, weights = (self.replaced or self.route)(tokens)
        y = self.mix(tokens, ids, weights)
        if (gate_up := self.get("shared.gate_up.weight")) is not None:
            down = self.get("shared.down.weight")
            y = y + mlp(ACTIVATIONS["swiglu"], tokens, gate_up, down)
        return y.reshape(x.shape)

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(tokens.dtype, torch.float32)
        logits = tokens.to(wide) @ self.get("router.weight").to(wide).T
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        bias = self.get("router.bias")
        ids = (scores if bias is None else scores + bias.detach()).topk(self.top_k).indices
        weights = torch.take_along_dim(scores, ids, -1)
        return ids, weights / weights.sum(-1, keepdim=True) if self.normalize else weights

    def mix(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return `[T, D]` weighted sums of the outputs of the chosen experts."""
        stacks = [self.get(f"experts.{name}") for name in EXPERT_NAMES]
        outputs = tokens.new_zeros(*ids.shape, tokens.shape[-1])
        for expert in range(len(stacks[0])):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            own = [None if stack is None else stack[expert] for stack in stacks]
            outputs = outputs.index_put((token, choice), mlp(self.activation, tokens[token], *own))
        return (weights.unsqueeze(-1).to(outputs.dtype) * outputs).sum(dim=1)


def mlp(
    activation: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    return linear(activation(linear(rows, gate_up, gate_up_bias)), down, down_bias)


def network(rows: torch.Tensor, counts: list[int], tensors: Mapping[str, Any]) -> torch.Tensor:
    """Run SwiGLU experts one after the other, with biases if there are any."""
    outputs = []
    for index, part in enumerate(rows.split(counts)):
        own = {name: stack[index].to(rows) for name, stack in tensors.items()}
        stacks = (own.get(name) for name in EXPERT_NAMES)
        outputs.append(mlp(ACTIVATIONS["swiglu"], part, *stacks))
    return torch.cat(outputs)


def with_network(layer: BalancedMoE, run: Any = network, bundle: Any = None) -> BalancedMoE:
    """Return a layer with the same weights whose experts are computed by `run`."""
    tensors = layer.experts.bundle if bundle is None else bundle
    experts = ExpertsFrom(run, tensors, list(layer.experts.home_experts))
    return BalancedMoE(layer.router, experts, balancer=layer.balancer, shared=layer.shared)


def _flat(name: str) -> str:
    return name.replace(".", "/")


def halves(up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return up[..., : up.shape[-1] // 2], up[..., up.shape[-1] // 2 :]


def clamped(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.unflatten(-1, (-1, 2)).unbind(-1)
    gate, value = gate.clamp(max=7.0), value.clamp(min=-7.0, max=7.0)
    return (value + 1) * gate / (1 + torch.exp(-1.702 * gate))


def normal(up: torch.Tensor) -> torch.Tensor:
    return up * (1 + torch.erf(up / 2**0.5)) / 2


# Reimplemented independently of ultraep.ops.products.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": lambda up: silu(halves(up)[0]) * halves(up)[1],
    "clamped_swiglu": clamped,
    "geglu": lambda up: normal(halves(up)[0]) * halves(up)[1],
    "gelu": normal,
    "squared_relu": lambda up: torch.where(up > 0, up * up, 0.0),
}
INPUTS = {"gelu": 1, "squared_relu": 1}


class FixedRouter(nn.Module):
    """Routes all tokens by fixed `[T, K]` ids and trainable weights."""

    def __init__(self, ids: torch.Tensor, weights: torch.Tensor) -> None:
        super().__init__()
        self.ids = ids
        self.weight = nn.Parameter(weights.clone())

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids, self.weight


@dataclass
class Example:
    """A layer, the inputs of every rank, and the gradients of the outputs.

    tokens: shape of the tokens of each rank, without the model width.
    skew: how strongly the router prefers the first experts.
    ids: fixed `[T, K]` ids of every rank, instead of a router.
    """

    tokens: list[int | tuple[int, ...]]
    experts: int = 8
    top_k: int = 2
    hidden: int = 16
    ffn: int = 12
    dtype: torch.dtype = torch.float64
    skew: float = 1.5
    scores: str = "softmax"
    normalize_top_k: bool = True
    bias: bool = False
    router_bias: bool = False
    shared_ffn: int | None = None
    activation: str = "swiglu"
    ids: list[torch.Tensor] | None = None
    seed: int = 0
    state: State = field(init=False)
    inputs: list[torch.Tensor] = field(init=False)
    gradients: list[torch.Tensor] = field(init=False)
    choice_weights: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        draw = _Draw(self.seed, self.dtype)
        self.state = self._draw_state(draw)
        shapes = [(t,) if isinstance(t, int) else tuple(t) for t in self.tokens]
        self.inputs = [draw(*shape, self.hidden) for shape in shapes]
        for x in self.inputs:
            x[..., 0] = 1.0  # the router's skew depends on it
        self.gradients = [draw(*shape, self.hidden) for shape in shapes]
        counts = [torch.Size(shape).numel() for shape in shapes]
        self.choice_weights = [draw(count, self.top_k) for count in counts]

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def layer_options(self) -> dict[str, Any]:
        names = ("scores", "normalize_top_k", "bias", "router_bias", "shared_ffn", "dtype")
        return {name: getattr(self, name) for name in names}

    def _draw_state(self, draw: _Draw) -> State:
        experts, hidden, ffn = self.experts, self.hidden, self.ffn
        state = {"router.weight": draw(experts, hidden, scale=hidden**-0.5)}
        state["router.weight"][:, 0] = torch.linspace(self.skew, -self.skew, experts)
        if self.router_bias:
            state["router.bias"] = draw(experts, scale=0.1)
        up = INPUTS.get(self.activation, 2) * ffn
        state["experts.gate_up_proj"] = draw(experts, up, hidden, scale=hidden**-0.5)
        state["experts.down_proj"] = draw(experts, hidden, ffn, scale=ffn**-0.5)
        if self.bias:
            state["experts.gate_up_bias"] = draw(experts, up)
            state["experts.down_bias"] = draw(experts, hidden)
        if self.shared_ffn:
            state["shared.gate_up.weight"] = draw(2 * self.shared_ffn, hidden, scale=0.2)
            state["shared.down.weight"] = draw(hidden, self.shared_ffn, scale=0.2)
        return state

    def layer(self, balancer: Balancer, **options: Any) -> BalancedMoE:
        layer = BalancedMoE.swiglu(
            self.hidden,
            self.ffn,
            self.experts,
            self.top_k,
            balancer=balancer,
            **self.layer_options | options,
        )
        if self.activation != "swiglu":
            layer = self._with_other_experts(layer)
        layer.load_full_state_dict(self.state)
        if self.ids is not None:
            rank = balancer.rank
            layer.router = FixedRouter(self.ids[rank], self.choice_weights[rank])
        return layer

    def _with_other_experts(self, layer: BalancedMoE) -> BalancedMoE:
        experts = Experts(
            self.hidden,
            self.ffn,
            list(layer.experts.home_experts),
            activation=self.activation,
            bias=self.bias,
            dtype=self.dtype,
        )
        return BalancedMoE(layer.router, experts, balancer=layer.balancer, shared=layer.shared)

    def twin(self) -> DenseMoE:
        router = None
        if self.ids is not None:
            router = FixedRouter(torch.cat(self.ids), torch.cat(self.choice_weights))
        return DenseMoE(
            self.state,
            self.top_k,
            scores=self.scores,
            normalize_top_k=self.normalize_top_k,
            router=router,
            activation=self.activation,
        )


class _Draw:
    """Draws random tensors, the same for every dtype up to its precision."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        return (drawn * scale).to(self._dtype)


@dataclass
class Result:
    """Outputs and gradients, by name, of one rank or of the twin."""

    output: torch.Tensor
    gradients: State
    plan: Plan | None = None
    stats: dict[str, Any] = field(default_factory=dict)


def on_every_rank(
    example: Example,
    work: Callable[..., Any],
    *,
    layer_options: Mapping[str, Any] | None = None,
    dispatcher: Callable[[Any], Any] = lambda comm: None,
    **balancer_options: Any,
) -> list[Any]:
    """Return the results of `work(layer, x, gradient)` on every rank.

    dispatcher: returns the dispatcher of a rank.
    """

    def on_rank(comm: Any) -> Any:
        options = {"experts": example.experts, "dispatcher": dispatcher(comm)} | balancer_options
        balancer = Balancer._with_settings(comm, **options)
        x = example.inputs[comm.rank].clone().requires_grad_()
        layer = example.layer(balancer, **layer_options or {})
        return work(layer, x, example.gradients[comm.rank])

    return LocalGroup(example.ranks).run(on_rank)


def on_ranks(example: Example, **options: Any) -> list[Result]:

    def work(layer: BalancedMoE, x: torch.Tensor, gradient: torch.Tensor) -> Result:
        y = layer(x)
        y.backward(gradient)
        stats = layer.balancer.stats()
        return Result(y.detach(), gradients_of(layer, x), layer.last_plan, stats)

    return on_every_rank(example, work, **options)


def gradients_of(layer: nn.Module, x: torch.Tensor) -> State:
    """Return the gradients of the parameters, by name, and of `x`."""
    gradients = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return gradients if x.grad is None else {"x": x.grad, **gradients}


def dense(example: Example) -> Result:
    """Run the same pass through the twin, on the tokens of all ranks."""
    twin = example.twin()
    x = torch.cat([x.reshape(-1, example.hidden) for x in example.inputs]).requires_grad_()
    y = twin(x)
    y.backward(torch.cat([g.reshape(-1, example.hidden) for g in example.gradients]))
    gradients = {name: twin.gradient(name) for name in example.state if name != "router.bias"}
    if example.ids is not None:
        gradients["router.weight"] = twin.replaced.weight.grad
    return Result(y.detach(), {"x": x.grad, **gradients})


def assert_same(
    results: list[Result],
    expected: Result,
    topology: ultraep.Topology,
    *,
    fixed_router: bool = False,
    tolerance: float | None = None,
) -> None:
    """Assert that the results of all ranks together are those of the twin."""
    flat = [result.output.flatten(0, -2) for result in results]
    assert_close(torch.cat(flat), expected.output, "output", tolerance)
    for name, gradient in expected.gradients.items():
        parts = [result.gradients[name] for result in results]
        if name == "x":
            pair = torch.cat([part.flatten(0, -2) for part in parts]), gradient
        elif name.startswith("experts."):
            by_rank = torch.from_numpy(topology.experts_by_rank.copy())
            pair = torch.cat(parts), gradient[by_rank]
        elif fixed_router and name == "router.weight":
            pair = torch.cat(parts), gradient
        else:
            pair = torch.stack(parts).sum(dim=0), gradient
        assert_close(*pair, f"gradient of {name}", tolerance)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, what: str = "", tolerance: float | None = None
) -> None:
    """Assert that two tensors are equal up to rounding, relative to the largest value."""
    shapes = f"{list(actual.shape)}, not {list(expected.shape)}"
    assert actual.shape == expected.shape, f"{what}: {shapes}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    if not expected.numel():
        return
    error = (actual.double() - expected.double()).abs().max().item()
    scale = expected.double().abs().max().item()
    allowed = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    assert error <= allowed * scale, f"{what}: off by {error:.3g}, largest value {scale:.3g}"


def assert_same_tensors(actual: list[State], expected: list[State]) -> None:
    for own, other in zip(actual, expected, strict=True):
        assert own.keys() == other.keys()
        for name, tensor in other.items():
            assert_close(own[name], tensor, name)


def check(example: Example, **options: Any) -> list[Result]:
    """Run layer and twin, compare them, and return the results of the ranks."""
    results = on_ranks(example, **options)
    plan = results[0].plan
    assert plan is not None
    assert all(result.plan == plan for result in results)
    plan.check(plan.loads)
    assert_same(results, dense(example), plan.topology, fixed_router=example.ids is not None)
    return results
