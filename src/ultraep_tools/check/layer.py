"""Level 3: one layer of the user's size: equal results, times, and what the simulator predicts.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

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

IMBALANCES = (1.0, 1.5, 2.0)
POLICIES = ("none", "ultraep")
ROUNDS, WARMUP = 7, 2
LEAST_GAIN = 1.02  # at imbalance 2
HALVINGS = 25
SAMPLE = 2048  # tokens that find the steepness of a load
STEEPEST = 20.0
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative errors
HOT, EMPTY, EVEN = "one hot expert", "one rank without tokens", "even"
BALANCE = BalanceConfig(objective="balance")  # replicates at any size
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def dispatcher_from(name: str, ranks: Ranks, size: LayerSize) -> Dispatcher | None:
    """Return the dispatcher of this name: "", "deepep", or MODULE:FUNCTION of the user.

    The function gets the process group and the `LayerSize`.
    """
    if not name:
        return None
    if name == "deepep":
        name = f"{__name__}:deepep"
    module_name, _, function_name = name.partition(":")
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
    nbytes = 2 * deep_ep.Buffer.get_dispatch_config(group.size()).get_nvl_buffer_size_hint(
        2 * size.hidden, group.size()
    )
    return DeepEPBuffer(deep_ep.Buffer(group, nbytes, 0))


# -- loads ---------------------------------------------------------------------------------------


def ids_of(size: LayerSize, rank: int, ranks: int, steep: float) -> torch.Tensor:
    """[T, K] distinct experts per token; experts of the first ranks are chosen more often.

    steep: how much more; 0: all equally.
    """
    generator = torch.Generator().manual_seed(rank)
    noise = torch.empty(size.tokens, size.experts).exponential_(generator=generator).log().neg()
    homes = torch.arange(size.experts) // (size.experts // ranks)
    inside = torch.arange(size.experts) % (size.experts // ranks)
    slope = steep * homes + min(1.0, steep) * 1.5 * torch.log1p(inside)
    return (noise - slope).topk(size.top_k, dim=1).indices


def steepness(size: LayerSize, ranks: int, imbalance: float) -> float:
    """Return the steepness at which the busiest rank has this many times the mean rows."""
    if imbalance <= 1:
        return 0.0
    sample, per_rank = replace(size, tokens=SAMPLE), size.experts // ranks
    low, high = 0.0, STEEPEST
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        rows = torch.bincount(
            ids_of(sample, 0, ranks, middle).flatten() // per_rank, minlength=ranks
        )
        below = float(rows.max() / rows.float().mean()) < imbalance
        low, high = (middle, high) if below else (low, middle)
    return low


def even_ids(size: LayerSize, rank: int) -> torch.Tensor:
    """[T, K] ids that give all experts the same rows, up to one."""
    first = rank * size.tokens * size.top_k
    rows = torch.arange(first, first + size.tokens * size.top_k) % size.experts
    return rows.view(size.tokens, size.top_k)


class GivenRoutes(nn.Module):
    """A router that chooses what it is given."""

    ids: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = tokens.new_full(self.ids.shape, 1 / self.ids.shape[1])
        return self.ids, gates.requires_grad_()


# -- the layer -----------------------------------------------------------------------------------


@dataclass
class CheckedLayer:
    """A layer with given routes, its balancer, and the [T, H] tokens of this rank."""

    moe: BalancedMoE
    balancer: Balancer
    tokens: torch.Tensor

    @classmethod
    def of(cls, ranks: Ranks, size: LayerSize, dispatcher: str) -> CheckedLayer:
        options: dict[str, Any] = {"experts": size.experts, "timeout": ranks.meeting.timeout}
        balancer = Balancer(
            ranks.group, dispatcher=dispatcher_from(dispatcher, ranks, size), **options
        )
        kind: Any = {"device": ranks.device, "dtype": DTYPES[size.dtype]}
        sizes = size.hidden, size.ffn, size.experts, size.top_k
        moe = BalancedMoE.swiglu(*sizes, balancer=balancer, **kind)
        moe.router = GivenRoutes()
        generator = torch.Generator().manual_seed(ranks.place.rank)
        tokens = torch.randn(size.tokens, size.hidden, generator=generator)
        return cls(moe, balancer, tokens.to(**kind))

    def step(self, ids: torch.Tensor, policy: str) -> dict[str, torch.Tensor]:
        """Run forward and backward; return outputs and gradients."""
        router: Any = self.moe.router
        router.ids = ids
        x = self.tokens[: len(ids)].detach().requires_grad_()
        self.moe.zero_grad(set_to_none=True)
        y = self.moe(x, policy=policy)
        y.backward(y.detach())
        results = {"outputs": y.detach(), "gradients of tokens": x.grad}
        for name, weight in self.moe.experts.named_parameters():
            results[f"gradients of {name}"] = weight.grad
        return {what: tensor for what, tensor in results.items() if tensor is not None}

    @property
    def replicas(self) -> int:
        """Replicas of the last step."""
        plan = self.moe.last_plan
        return 0 if plan is None else plan.to_host().num_replicas


def compare(size: LayerSize, dispatcher: str, ranks: Ranks) -> Facts:
    """Compare outputs and gradients of balanced steps with steps without balancing."""
    layer = CheckedLayer.of(ranks, size, dispatcher)
    place, group = ranks.place, ranks.connected
    layer.balancer.config = BALANCE
    hot = ids_of(size, place.rank, place.size, 0.0)
    hot[~(hot == 0).any(dim=1), 0] = 0  # no token has an expert twice
    empty = ids_of(size, place.rank, place.size, steepness(size, place.size, 1.5))
    cases = {HOT: hot, EMPTY: empty[:0] if place.rank == place.size - 1 else empty}
    facts: Facts = {"errors": {}, "replicas": {}}
    for name, ids in cases.items():
        wanted, got = (layer.step(ids.to(ranks.device), policy) for policy in POLICIES)
        facts["errors"][name] = max(_distance(got[what], wanted[what]) for what in wanted)
        facts["replicas"][name] = layer.replicas
    group.gather_objects(None)
    layer.balancer.close()
    return facts | {"limit": LIMITS[DTYPES[size.dtype]]}


def _distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the norm of the expected tensor."""
    norm = float(wanted.double().norm())
    return float((got.double() - wanted.double()).norm()) / norm if norm else float(got.norm())


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
    cases = ", ".join(f"{case} ({replicas[case]} replicas)" for case in replicas)
    finding.summary = f"within {worst:.1g} of the layer without balancing: {cases}"
    return finding


# -- times ---------------------------------------------------------------------------------------


def time_layer(size: LayerSize, dispatcher: str, ranks: Ranks) -> Facts:
    """Time steps without and with balancing at several imbalances, beside even routing."""
    layer, place = CheckedLayer.of(ranks, size, dispatcher), ranks.place
    even = even_ids(size, place.rank)
    steps = {EVEN: partial(layer.step, even.to(ranks.device), "none")}
    loads, replicas, slowest = {}, {}, defaultdict[str, list[float]](list)
    for imbalance in IMBALANCES:
        steep = steepness(size, place.size, imbalance)
        ids = even if imbalance == 1 else ids_of(size, place.rank, place.size, steep)
        loads[str(imbalance)] = torch.bincount(ids.flatten(), minlength=size.experts).tolist()
        for policy in POLICIES:
            steps[f"{policy} {imbalance}"] = partial(layer.step, ids.to(ranks.device), policy)
    names = list(steps)
    for turn in range(WARMUP + ROUNDS):  # each round begins with another step
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            (seconds,) = seconds_of(steps[name], ranks.connected, ranks.device, 1)
            slowest[name].append(max(ranks.connected.gather_objects(seconds)))
            replicas[name] = layer.replicas
    medians = {name: median(values[WARMUP:]) for name, values in slowest.items()}
    facts = {"seconds": medians, "replicas": replicas, "loads": loads}
    facts["balancer"] = str(layer.balancer)
    layer.balancer.close()
    return facts


def judge_times(size: LayerSize, domain: int, facts: Sequence[Facts]) -> Finding:
    seconds, replicas = facts[0]["seconds"], facts[0]["replicas"]
    finding, gains = Finding("times", f"forward and backward, {size}"), {}
    finding.table = [["imbalance", "ms without", "ms balanced", "gain", "predicted", "replicas"]]
    for imbalance in map(str, IMBALANCES):
        without, balanced = seconds[f"none {imbalance}"], seconds[f"ultraep {imbalance}"]
        loads = [own["loads"][imbalance] for own in facts]
        predicted = predicted_gain(size, domain, loads, seconds[EVEN])
        gains[imbalance] = without / balanced
        times = f"{1e3 * without:.1f}", f"{1e3 * balanced:.1f}"
        ratios = f"{gains[imbalance]:.2f}x", f"{predicted:.2f}x"
        finding.table.append([imbalance, *times, *ratios, str(replicas[f"ultraep {imbalance}"])])
    finding.notes.append("predicted: by the simulator, with the speed fitted to even routing")
    finding.facts = {"size": asdict(size), "gains": gains, "idle_cost": 1 / gains["1.0"] - 1}
    finding.facts |= {"ranks": list(facts), "table": finding.table}
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
