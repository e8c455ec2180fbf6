"""Level 3: one layer of the user's size: equal results, times, and what the simulator predicts.

Shapes: T tokens of a rank, H hidden, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch import nn

from ultraep import BalanceConfig, BalancedMoE, Balancer
from ultraep.dispatch import Dispatcher
from ultraep.errors import ConfigError
from ultraep_tools.check.group import Facts, Part, Ranks
from ultraep_tools.check.links import seconds_of
from ultraep_tools.check.predict import predicted_gain
from ultraep_tools.check.report import Finding
from ultraep_tools.check.size import LayerSize
from ultraep_tools.report.words import counted

IMBALANCES = (1.0, 1.5, 2.0)
POLICIES = ("none", "ultraep")
ROUNDS, WARMUP = 7, 2
LEAST_GAIN = 1.02  # at imbalance 2
MOST_VARIATION = 0.25  # upper over lower quartile of a time
SKEW = 1.5  # exponent of the loads of a rank's experts
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
LIMITS = {"cpu": 1e-4, "cuda": 2e-2}  # relative errors
HOT, EMPTY = "one hot expert", "one rank without tokens"
BALANCE = BalanceConfig(objective="balance")  # replicates at any size


def dispatcher_from(name: str, ranks: Ranks, size: LayerSize) -> Dispatcher | None:
    """Return the dispatcher of this name: "", "deepep", or MODULE:FUNCTION of the user.

    The function gets the process group and the `LayerSize`.
    """
    if not name:
        return None
    module_name, _, function_name = name.partition(":")
    if name == "deepep":
        module_name, function_name = __name__, "deepep"
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--dispatcher must be deepep or MODULE:FUNCTION: {error}") from None
    dispatcher: Dispatcher = function(ranks.group, size)
    return dispatcher


def deepep(group: Any, size: LayerSize) -> Dispatcher:
    """Return DeepEP's dispatcher, with the buffer of the installed version."""
    deep_ep: Any = importlib.import_module("deep_ep")
    from ultraep.dispatchers.deepep import DeepEP, DeepEPBuffer

    if hasattr(deep_ep, "ElasticBuffer"):
        limits = {"num_max_tokens_per_rank": size.tokens, "hidden": size.hidden}
        options = {"num_topk": size.top_k, "allow_multiple_reduction": True}
        return DeepEP(deep_ep.ElasticBuffer(group, **limits, **options))
    config = deep_ep.Buffer.get_dispatch_config(group.size())
    nbytes = 2 * config.get_nvl_buffer_size_hint(2 * size.hidden, group.size())
    return DeepEPBuffer(deep_ep.Buffer(group, nbytes, 0))


# -- the layer -----------------------------------------------------------------------------------


def chances_of(size: LayerSize, ranks: int, imbalance: float) -> torch.Tensor:
    """[E] chance that a token chooses an expert. Rank 0 serves `imbalance` times the mean.

    Experts of a rank differ as well, as far as no chance exceeds 1, unless the imbalance is 1.
    """
    inside, mean = size.experts // ranks, size.top_k / size.experts
    hot = min(imbalance, ranks, 1 / mean)
    chances = torch.full((ranks, inside), mean * (ranks - hot) / max(1, ranks - 1)).double()
    chances[0] = mean * hot
    if imbalance == 1:
        return chances.flatten()
    shares = torch.arange(1, inside + 1).double() ** -SKEW
    shares *= inside / shares.sum()
    steepest = (1 / chances - 1) / max(1e-9, float(shares[0]) - 1)
    return (chances * (1 + steepest.clamp(0, 1) * (shares - 1))).flatten()


def ids_of(size: LayerSize, rank: int, ranks: int, imbalance: float) -> torch.Tensor:
    """[T, K] distinct experts of every token.

    The chances of all experts form a line of length K. A token samples it at K points at distance
    one; the starts of all tokens are evenly spaced.
    """
    line = chances_of(size, ranks, imbalance).cumsum(0)
    order = torch.randperm(size.tokens, generator=torch.Generator().manual_seed(rank))
    points = (order[:, None] + 0.5).double() / size.tokens + torch.arange(size.top_k)
    return torch.searchsorted(line, points, right=True).clamp(max=size.experts - 1)


class GivenRoutes(nn.Module):
    """A router that chooses what it is given."""

    ids: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = tokens.new_full(self.ids.shape, 1 / self.ids.shape[1])
        return self.ids, gates.requires_grad_()


class CheckedLayer:
    """A layer with given routes and tokens."""

    def __init__(self, size: LayerSize, dispatcher: str, ranks: Ranks) -> None:
        options: Any = {"dispatcher": dispatcher_from(dispatcher, ranks, size)}
        options |= {"experts": size.experts, "timeout": ranks.meeting.timeout}
        self.balancer = Balancer(ranks.group, **options)
        kind: Any = {"device": ranks.device, "dtype": DTYPES[ranks.device.type]}
        sizes = size.hidden, size.ffn, size.experts, size.top_k
        self.moe = BalancedMoE.swiglu(*sizes, balancer=self.balancer, **kind)
        self.moe.router = self.router = GivenRoutes()
        generator = torch.Generator().manual_seed(ranks.place.rank)
        self.tokens = torch.randn(size.tokens, size.hidden, generator=generator).to(**kind)

    def step(self, ids: torch.Tensor, policy: str) -> dict[str, torch.Tensor]:
        """Run forward and backward; return outputs and gradients."""
        self.router.ids = ids
        x = self.tokens[: len(ids)].detach().requires_grad_()
        self.moe.zero_grad(set_to_none=True)
        y = self.moe(x, policy=policy)
        y.backward(y.detach())
        results = {"outputs": y.detach(), "gradients of tokens": x.grad}
        results |= {name: weight.grad for name, weight in self.moe.experts.named_parameters()}
        return {what: tensor for what, tensor in results.items() if tensor is not None}

    @property
    def replicas(self) -> int:
        """Replicas of the last step."""
        plan = self.moe.last_plan
        return 0 if plan is None else plan.to_host().num_replicas


def compare(size: LayerSize, dispatcher: str, ranks: Ranks) -> Facts:
    """Compare outputs and gradients of balanced steps with steps without balancing."""
    layer, place = CheckedLayer(size, dispatcher, ranks), ranks.place
    layer.balancer.config = BALANCE
    hot = ids_of(size, place.rank, place.size, 1.0)
    hot[~(hot == 0).any(dim=1), -1] = 0  # no token has an expert twice
    empty = ids_of(size, place.rank, place.size, 1.5)
    cases = {HOT: hot, EMPTY: empty[:0] if place.rank == place.size - 1 else empty}
    facts: Facts = {"errors": {}, "replicas": {}, "limit": LIMITS[ranks.device.type]}
    for name, ids in cases.items():
        expected, results = (layer.step(ids.to(ranks.device), policy) for policy in POLICIES)
        errors = [_distance(results[what], expected[what]) for what in expected]
        facts["errors"][name], facts["replicas"][name] = max(errors), layer.replicas
    ranks.connected.gather_objects(None)
    layer.balancer.close()
    return facts


def _distance(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    norm = float(expected.double().norm())
    return float((result.double() - expected.double()).norm()) / (norm or 1.0)


def judge_compared(facts: Sequence[Facts]) -> Finding:
    finding = Finding("equal results", facts={"ranks": list(facts)})
    for rank, own in enumerate(facts):
        for case, error in own["errors"].items():
            if not error <= own["limit"]:
                finding.problems.append(
                    f"with {case}, results of rank {rank} differ from the layer without balancing "
                    f"by {error:.2g} (limit {own['limit']:g})"
                )
    replicas = facts[0]["replicas"]
    if len(facts) > 1 and not replicas[HOT]:
        finding.problems.append("a hot expert got no replica, so nothing was compared")
    worst = max(error for own in facts for error in own["errors"].values())
    cases = ", ".join(f"{case} ({counted(count, 'replica')})" for case, count in replicas.items())
    finding.summary = f"within {worst:.1g} of the layer without balancing: {cases}"
    return finding


# -- times ---------------------------------------------------------------------------------------


def time_layer(size: LayerSize, dispatcher: str, ranks: Ranks) -> Facts:
    """Time steps without and with balancing at several imbalances; 1 is even routing."""
    layer, place = CheckedLayer(size, dispatcher, ranks), ranks.place
    steps, loads, replicas, slowest = {}, {}, {}, defaultdict[str, list[float]](list)
    for imbalance in IMBALANCES:
        ids = ids_of(size, place.rank, place.size, imbalance)
        loads[str(imbalance)] = torch.bincount(ids.flatten(), minlength=size.experts).tolist()
        for policy in POLICIES:
            steps[f"{policy} {imbalance}"] = partial(layer.step, ids.to(ranks.device), policy)
    names = list(steps)
    for turn in range(WARMUP + ROUNDS):  # each round begins with another step
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            (seconds,) = seconds_of(steps[name], ranks.connected, ranks.device, 1)
            slowest[name].append(max(ranks.connected.gather_objects(seconds)))
            replicas[name] = layer.replicas
    balancer = str(layer.balancer)
    layer.balancer.close()
    rounds = {name: values[WARMUP:] for name, values in slowest.items()}
    return {"seconds": rounds, "replicas": replicas, "loads": loads, "balancer": balancer}


def judge_times(size: LayerSize, domain: int, facts: Sequence[Facts]) -> Finding:
    rounds, replicas = facts[0]["seconds"], facts[0]["replicas"]
    seconds = {name: median(values) for name, values in rounds.items()}
    finding, gains = Finding("times", f"forward and backward, {size}"), {}
    finding.table = [["imbalance", "ms without", "ms balanced", "gain", "predicted", "replicas"]]
    for imbalance in map(str, IMBALANCES):
        without, balanced = (seconds[f"{policy} {imbalance}"] for policy in POLICIES)
        loads = np.array([own["loads"][imbalance] for own in facts])
        predicted = predicted_gain(size, domain, loads, seconds["none 1.0"])
        gains[imbalance] = without / balanced
        times = f"{1e3 * without:.1f}", f"{1e3 * balanced:.1f}"
        ratios = f"{gains[imbalance]:.2f}x", f"{predicted:.2f}x"
        finding.table.append([imbalance, *times, *ratios, str(replicas[f"ultraep {imbalance}"])])
    finding.notes.append("predicted: by the simulator, with the speed fitted to even routing")
    finding.facts = {"size": asdict(size), "gains": gains, "idle_cost": 1 / gains["1.0"] - 1}
    finding.facts["ranks"] = list(facts)
    varies = max(quartiles[2] / quartiles[0] for quartiles in map(quantiles, rounds.values())) - 1
    if varies > MOST_VARIATION:
        finding.warnings.append(f"times vary by {varies:.0%}: check on idle hosts")
    if gains["2.0"] < LEAST_GAIN:
        finding.warnings.append("balancing a layer of this size saves no time here")
    return finding


def parts_of(size: LayerSize, dispatcher: str, domain: int) -> tuple[Part, ...]:
    """Return the parts of level 3."""
    judge = partial(judge_times, size, domain)
    return (
        Part("equal results", partial(compare, size, dispatcher), judge_compared, patience=3),
        Part("times", partial(time_layer, size, dispatcher), judge, patience=3),
    )
