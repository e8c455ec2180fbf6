"""BalancedMoE: a Mixture-of-Experts layer that balances every microbatch. Read this first.

Shapes: T local tokens, K experts per token, E experts, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from ultraep.combine import combine
from ultraep.comm import Message
from ultraep.dispatch import dispatch
from ultraep.errors import ConfigError, LoadError
from ultraep.experts import Experts, draw, swiglu
from ultraep.plan import Plan
from ultraep.runtime.balancer import Balancer

if TYPE_CHECKING:
    from ultraep.runtime.control import DevicePlan
    from ultraep.runtime.device import DeviceBalancer

SCORES = ("softmax", "sigmoid")


class BalancedMoE(nn.Module):
    """Top-k routed SwiGLU experts, spread over the ranks of a balancer's group.

    balancer: a `Balancer`; or a `DeviceBalancer`, which needs no host between the stages.
    hidden, ffn: model width, and the hidden width of an expert.
    scores: "softmax" over all experts, or "sigmoid" of each.
    normalize_top_k: the weights of a token's experts add up to one.
    shared_ffn: hidden width of an expert that every token passes; None: there is none.
    bias: experts have biases.   router_bias: added to the scores of the choice, not to the weights.
    bitwise: outputs, and gradients of inputs and router, do not depend on the plan in a single bit;
        somewhat slower.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        balancer: Balancer | DeviceBalancer,
        scores: str = "softmax",
        normalize_top_k: bool = True,
        shared_ffn: int | None = None,
        bias: bool = False,
        router_bias: bool = False,
        bitwise: bool = False,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        topology = balancer.topology
        if experts != topology.experts:
            raise ConfigError(f"{experts} experts, but the balancer has {topology.experts}")
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.hidden = hidden
        self.balancer: Any = balancer
        self.router = Router(
            hidden, experts, top_k, scores, normalize_top_k, router_bias, seed, **options
        )
        mine = topology.home_experts(balancer.rank).tolist()
        self.experts = Experts(
            hidden, ffn, mine, bias=bias, bitwise=bitwise, seed=seed + 1, **options
        )
        self.experts.spread_over(balancer)
        self.shared = SwiGLU(hidden, shared_ffn, seed + 2, **options) if shared_ffn else None
        self.last_plan: Plan | DevicePlan | None = None
        self.layer_index = balancer.register_layer()  # layers count in the order they are made

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor, *, policy: str | None = None) -> torch.Tensor:
        """[..., D] -> [..., D]. `policy` replaces the balancer's for this call."""
        if x.shape[-1] != self.hidden:
            raise LoadError(f"x must be [..., {self.hidden}], got {list(x.shape)}")
        balancer, bundle = self.balancer, self.experts.bundle
        tokens = x.reshape(-1, self.hidden)
        ids, weights = self.router(tokens)
        rows = in_autocast_type(tokens)
        kinds = {"bundle": bundle, "inputs": rows, "weights": weights}
        loads = balancer.gather(ids, layer=self.layer_index, **kinds)  # 1 loads
        plan = self.last_plan = balancer.plan(loads, policy=policy)  # 2 plan
        replicas = balancer.replicate(plan, loads, bundle)
        with replicas as copies:  # 3 replicate
            roads = balancer.roads(balancer.reroute(ids, plan), loads)  # 4 reroute
            arrivals = dispatch(rows, weights, roads)  # 5 dispatch
            outputs = self.experts(arrivals, replicas, copies)  # 6 experts
        y = combine(outputs, roads)  # 7 combine
        # 8 reduce happens in the backward of stage 6
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.reshape(x.shape)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state with all experts, on every rank: a checkpoint for any number of ranks.

        All ranks call it, also if only one of them saves it.
        """
        if isinstance(self.balancer, Balancer):
            self.balancer.at_state(self.layer_index, self.router.weight.device)
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        for name in self.experts.bundle:
            state[f"experts.{name}"] = gather_experts(state[f"experts.{name}"], self.balancer)
        return state

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a `full_state_dict`, also one of another number of ranks, with or without copies."""
        topology, rank = self.balancer.topology, self.balancer.rank
        own = dict(state)
        for name in [name for name in state if name.startswith("experts.")]:
            if len(state[name]) != topology.experts:
                raise ConfigError(
                    f"{name!r} holds {len(state[name])} experts, the layer has {topology.experts}"
                )
            own[name] = state[name][topology.home_experts(rank).tolist()]
        self.load_state_dict(own)


def gather_experts(stacked: torch.Tensor, balancer: Balancer) -> torch.Tensor:
    """[E, ...] the stacked home experts of all ranks, in the order of the experts."""
    topology, comm = balancer.topology, balancer.comm
    stacked = stacked.detach().contiguous()
    parts = [stacked.new_empty(homes, *stacked.shape[1:]) for homes in topology.homes_per_rank]
    comm.exchange(
        [Message(peer, stacked) for peer in range(comm.size)],
        [Message(peer, part) for peer, part in enumerate(parts)],
    )
    by_rank = torch.cat(parts)
    every = torch.empty_like(by_rank)
    every[torch.from_numpy(topology.experts_by_rank.copy())] = by_rank
    return every


class Router(nn.Module):
    """Scores every expert for every token and keeps the best `top_k`."""

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        scores: str,
        normalize: bool,
        bias: bool,
        seed: int,
        **options: Any,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ConfigError(f"top_k must lie between 1 and {experts} experts, got {top_k}")
        if scores not in SCORES:
            raise ConfigError(f"unknown scores {scores!r}; known are {', '.join(SCORES)}")
        self.top_k, self.scores, self.normalize = top_k, scores, normalize
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(experts, hidden, generator=generator, dtype=torch.float64)
        weight = torch.empty(experts, hidden, **options)
        self.weight = nn.Parameter(weight.copy_(drawn / math.sqrt(hidden)))
        zeros = torch.zeros(experts, **options) if bias else None
        self.register_buffer("bias", zeros)
        self.bias: torch.Tensor | None

    def forward(self, tokens_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, K] chosen experts, and [T, K] their weights."""
        wide = torch.promote_types(tokens_TD.dtype, torch.float32)
        with torch.autocast(tokens_TD.device.type, enabled=False):
            logits = nn.functional.linear(tokens_TD.to(wide), self.weight.to(wide))
        scores = logits.softmax(dim=-1) if self.scores == "softmax" else logits.sigmoid()
        choice = scores if self.bias is None else scores + self.bias
        ids = choice.topk(self.top_k, dim=-1).indices
        if not self.normalize:
            return ids, scores.gather(-1, ids)
        # Scores of chosen experts may all be too small for their type; their logarithms are not.
        logs = logits if self.scores == "softmax" else logsigmoid(logits)
        return ids, logs.gather(-1, ids).softmax(dim=-1)


class SwiGLU(nn.Module):
    """An expert that every token passes, on its own rank."""

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


def in_autocast_type(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type that autocast asks for, if it is on; it leaves float64 alone."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
