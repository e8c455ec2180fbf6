"""BalancedMoE: a Mixture-of-Experts layer that balances every microbatch. Read this first.

Shapes: T local tokens, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, logsigmoid

from ultraep.config import check_choice
from ultraep.errors import ConfigError
from ultraep.experts.modules import Experts, draw
from ultraep.microbatch import AnyPlan, Layer
from ultraep.ops.compiled_op import handle_of, routed_experts
from ultraep.ops.products import swiglu
from ultraep.passes import NOTING_FAILURES
from ultraep.runtime.balancer import Balancer
from ultraep.runtime.state import gather_experts

SCORES = ("softmax", "sigmoid")
NOTHING = nullcontext()


def run_stages(
    balancer: Balancer,
    layer: Layer,
    ids: torch.Tensor,
    gates: torch.Tensor,
    tokens: torch.Tensor,
    *,
    policy: str | None = None,
) -> tuple[torch.Tensor, AnyPlan]:
    """Run the routed experts of a layer on `[T, D]` tokens; return `[T, D]` outputs and the plan.

    `BalancedMoE` and the layers of all integrations run these lines.
    """
    experts = layer.serve
    if experts is None:
        raise ConfigError(f"layer {layer.index} has no `serve`; pass the experts as Layer(serve=)")
    microbatch = balancer.begin(layer, ids, gates, tokens, policy=policy)
    with NOTING_FAILURES:
        microbatch.count()  # 1 exact loads of all ranks
        plan = microbatch.plan()  # 2 replicas and their quotas
        with microbatch.replicate() as replicas:  # 3 fill the spare slots
            microbatch.reroute()  # 4 a slot for every routed row
            rows = microbatch.dispatch()  # 5 send the rows to their slots
            outputs = experts(rows, replicas)  # 6 run the networks; their backward is 8, reduce
        return microbatch.combine(outputs), plan  # 7 sum the outputs of each token


class BalancedMoE(nn.Module):
    """A Mixture-of-Experts layer, its experts spread over the ranks of a balancer.

    router: any module that maps `[T, D]` tokens to a `Routing`.
    experts: `Experts` or `ExpertsFrom` for the home experts of this rank.
    shared: an optional module that every token passes on its own rank.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: Any,
        *,
        balancer: Balancer,
        shared: nn.Module | None = None,
    ) -> None:
        super().__init__()
        home_experts = tuple(balancer.topology.home_experts(balancer.rank).tolist())
        if experts.home_experts != home_experts:
            raise ConfigError(
                f"the experts must be the home experts of rank {balancer.rank}, "
                f"{list(home_experts)}; got {list(experts.home_experts)}"
            )
        self.router, self.experts, self.shared, self.balancer = router, experts, shared, balancer
        self.experts.spread_over(balancer)
        self.last_plan: AnyPlan | None = None
        self._register()

    def _register(self) -> None:
        self.layer_index = self.balancer.register_layer()
        self._handle = handle_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> BalancedMoE:
        """Copy the weights. The copy is another layer of the same balancer."""
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        copied._register()
        return copied

    def forward(
        self, x: torch.Tensor, *, policy: str | None = None, with_routing: bool = False
    ) -> Any:
        """Map `[..., D]` to `[..., D]`.

        policy: replaces the policy of the balancer for this call.
        with_routing: also return the `Routing`, for auxiliary losses.
        """
        tokens = x.reshape(-1, x.shape[-1])
        rows = to_autocast_dtype(tokens)
        layer = None if torch.compiler.is_compiling() else self._layer(rows)
        ids, gates, _ = routing = Routing(*self.router(tokens))
        if layer is None:
            y = routed_experts(self._handle, rows, ids, gates, self.experts.weights(), policy)
        else:
            y, self.last_plan = run_stages(self.balancer, layer, ids, gates, rows, policy=policy)
        if self.shared is not None:
            y = y + self.shared(tokens)
        y = y.reshape(x.shape)
        return (y, routing) if with_routing else y

    def _layer(self, rows: torch.Tensor, weights: Sequence[torch.Tensor] | None = None) -> Layer:
        """Return the experts as they are now; raise if they cannot serve these rows."""
        experts = self.experts
        bundle = experts.bundle
        experts.check(rows)
        serve = experts if weights is None else partial(experts, weights=weights)
        return Layer(self.layer_index, bundle, serve, experts.pack)

    def run_routed(
        self,
        tokens: torch.Tensor,
        ids: torch.Tensor,
        gates: torch.Tensor,
        weights: Sequence[torch.Tensor],
        policy: str | None,
    ) -> torch.Tensor:
        """Run the routed experts with these weights; compiled graphs call it."""
        layer = self._layer(tokens, weights)
        y, self.last_plan = run_stages(self.balancer, layer, ids, gates, tokens, policy=policy)
        return y

    @classmethod
    def swiglu(
        cls,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        balancer: Balancer,
        scores: str = "softmax",
        normalize_top_k: bool = True,
        shared_ffn: int | None = None,
        bias: bool = False,
        router_bias: bool = False,
        bitwise: bool = False,
        quantised: str | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> BalancedMoE:
        """Build the layer of most models: a `Router` and SwiGLU `Experts`.

        hidden, ffn: model width, and hidden width of an expert.
        scores, normalize_top_k, router_bias: see `Router`.
        bias, bitwise, quantised: see `Experts`.
        shared_ffn: hidden width of a shared expert; None: no shared expert.
        """
        topology, options = balancer.topology, {"dtype": dtype, "device": device}
        if experts != topology.experts:
            raise ConfigError(
                f"the layer has {experts} experts, but the balancer has {topology.experts}"
            )
        router = Router(
            hidden,
            experts,
            top_k,
            scores=scores,
            normalize=normalize_top_k,
            bias=router_bias,
            seed=seed,
            **options,
        )
        home = Experts(
            hidden,
            ffn,
            topology.home_experts(balancer.rank).tolist(),
            bias=bias,
            bitwise=bitwise,
            quantised=quantised,
            seed=seed + 1,
            **options,  # type: ignore[arg-type]
        )
        shared = SwiGLU(hidden, shared_ffn, seed + 2, **options) if shared_ffn else None
        return cls(router, home, balancer=balancer, shared=shared)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state with the experts of all ranks, which loads on any number of ranks.

        Collective: all ranks must call it, even if only one rank saves the result.
        """
        if not self.experts.state_dict():
            raise ConfigError(
                f"full_state_dict() cannot collect the weights of {type(self.experts).__name__}, "
                "because another module owns them; call ultraep.gather_experts(tensor, balancer) "
                "for each tensor"
            )
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.balancer.at_state(self.layer_index, next(iter(state.values())).device)
        for name in self.experts.state_dict():
            state[f"experts.{name}"] = gather_experts(state[f"experts.{name}"], self.balancer)
        return state

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a `full_state_dict`, saved on any number of ranks."""
        topology = self.balancer.topology
        home_experts = topology.home_experts(self.balancer.rank).tolist()
        own = dict(state)
        for name in [name for name in state if name.startswith("experts.")]:
            shape = list(state[name].shape)
            if shape[:1] != [topology.experts]:
                raise ConfigError(
                    f"{name!r} has the shape {shape}, but the layer has {topology.experts} experts;"
                    " load the state of a layer of the same size"
                )
            own[name] = state[name][home_experts]
        try:
            self.load_state_dict(own)
        except RuntimeError as error:  # names or shapes of another layer
            raise ConfigError(" ".join(str(error).split())) from None


class Routing(NamedTuple):
    """The decision of a router for the tokens of this rank."""

    ids: torch.Tensor  # [T, K] chosen experts; -1: padding
    gates: torch.Tensor  # [T, K] factor of each expert output
    logits: torch.Tensor | None = None  # [T, E] for auxiliary losses


class Router(nn.Module):
    """A linear router that selects the `top_k` experts of each token.

    scores: "softmax" over all experts, or "sigmoid" of each.
    normalize: scale the gates of each token to sum to one.
    bias: add a buffer to the scores when selecting experts; it does not change the gates.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalize: bool = True,
        bias: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ConfigError(f"top_k must lie between 1 and {experts} experts, got {top_k}")
        check_choice("scores", scores, SCORES)
        self.top_k, self.scores, self.normalize = top_k, scores, normalize
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(experts, hidden, generator=generator, dtype=torch.float64)
        weight = torch.empty(experts, hidden, **options)
        self.weight = nn.Parameter(weight.copy_(drawn / math.sqrt(hidden)))
        self.register_buffer("bias", torch.zeros(experts, **options) if bias else None)
        self.bias: torch.Tensor | None

    def forward(self, tokens_TD: torch.Tensor) -> Routing:
        """Return ids, gates and logits of every token."""
        wide = torch.promote_types(tokens_TD.dtype, torch.float32)
        device = tokens_TD.device.type
        autocast = torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if autocast else NOTHING:
            logits = linear(tokens_TD.to(wide), self.weight.to(wide))
        softmax = self.scores == "softmax"
        if softmax and self.normalize and self.bias is None:  # gates of the largest logits
            chosen, ids = logits.topk(self.top_k, dim=-1)
            return Routing(ids, chosen.softmax(dim=-1), logits)
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        choice = scores if self.bias is None else scores + self.bias
        ids = choice.topk(self.top_k, dim=-1).indices
        if not self.normalize:
            return Routing(ids, scores.gather(-1, ids), logits)
        # Normalise in log space: the scores of the chosen experts may all underflow.
        logs = logits if softmax else logsigmoid(logits)
        return Routing(ids, logs.gather(-1, ids).softmax(dim=-1), logits)


class SwiGLU(nn.Module):
    """A shared expert: every token passes it on its own rank."""

    def __init__(self, hidden: int, ffn: int, seed: int, **options: Any) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * ffn, bias=False, **options)
        self.down = nn.Linear(ffn, hidden, bias=False, **options)
        generator = torch.Generator().manual_seed(seed)
        for layer in (self.gate_up, self.down):
            draw(layer.weight, generator)

    def forward(self, tokens_TD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(swiglu(self.gate_up(tokens_TD)))
        return out


def to_autocast_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a tensor to the autocast dtype, if autocast is on. float64 stays, as in PyTorch."""
    device = tensor.device.type
    if not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
