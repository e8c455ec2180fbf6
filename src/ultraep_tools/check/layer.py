"""Level 3: one layer of the user's size: equal results, times, and what the simulator predicts.

Shapes: T tokens of a rank, H hidden, K experts per token.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import permutations
from operator import truediv
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch
from torch import nn

from ultraep import BalanceConfig, BalancedMoE, Balancer
from ultraep.config import POLICY_VARIABLE
from ultraep.dispatch import Dispatcher
from ultraep.errors import ConfigError
from ultraep.workload.generators import Load
from ultraep_tools.check.group import Facts, Part, Ranks
from ultraep_tools.check.links import seconds_of
from ultraep_tools.check.predict import predicted_gain
from ultraep_tools.check.report import Finding, one_line
from ultraep_tools.check.size import LayerSize
from ultraep_tools.report.words import counted

NONE, BALANCED, AGAIN = "none", "balanced", "none again"
ROUNDS = {1.0: 24, 1.5: 12, 2.0: 12}  # by imbalance; 1 is even routing
WARMUP, LEAST = 2, 6  # rounds that are not counted; rounds on slow machines
LONGEST = 20.0  # seconds of the rounds of an imbalance, on slow machines
STEPS = {"cpu": 1, "cuda": 4}  # timed together
LEAST_GAIN = 1.02  # at imbalance 2
MOST_SPREAD = 0.25  # between the quartiles of the ratios of a case
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
LIMITS = {"cpu": 1e-4, "cuda": 2e-2}  # relative errors
HOT, EMPTY = "one hot expert", "one rank without tokens"


def dispatcher_from(name: str, ranks: Ranks, size: LayerSize) -> Dispatcher | None:
    """Return the dispatcher of this name: "", "deepep", or MODULE:FUNCTION of the user.

    The function gets the process group and the `LayerSize`.
    """
    if not name:
        return None
    path = f"{__name__}:deepep" if name == "deepep" else name
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        dispatcher: Dispatcher = function(ranks.group, size)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--dispatcher {name}: {one_line(error)}") from None
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


def ids_of(size: LayerSize, rank: int, ranks: int, imbalance: float) -> torch.Tensor:
    """[T, K] distinct experts of every token. Rank 0 serves `imbalance` times the mean, or less.

    At imbalance 1, all experts get the same number of rows.
    """
    sizes: Any = {"top_k": size.top_k, "tokens": size.tokens}
    load = Load("even") if imbalance == 1 else Load("zipf ordered", imbalance)
    try:
        loads_E = load.draw(ranks, size.experts, **sizes)[rank]
    except ConfigError:  # so few ranks or experts cannot reach it
        loads_E = Load("zipf ordered").draw(ranks, size.experts, **sizes)[rank]
    ids = np.repeat(np.arange(size.experts), loads_E).reshape(size.top_k, size.tokens).T
    return torch.from_numpy(np.random.default_rng(rank).permutation(ids))


class GivenRoutes(nn.Module):
    """A router that chooses what it is given."""

    ids: torch.Tensor

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = tokens.new_full(self.ids.shape, 1 / self.ids.shape[1])
        return self.ids, gates.requires_grad_()


class CheckedLayers:
    """The same layer without and with balancing: the same weights, but two balancers."""

    def __init__(self, size: LayerSize, dispatcher: str, ranks: Ranks, config: BalanceConfig):
        os.environ.pop(POLICY_VARIABLE, None)  # it would replace both policies
        options: Any = {"dispatcher": dispatcher_from(dispatcher, ranks, size)}
        options |= {"experts": size.experts, "timeout": ranks.meeting.timeout}
        none, balanced = (
            Balancer(ranks.group, config=of_layer, **options)
            for of_layer in (BalanceConfig(policy="none"), config)
        )
        kind: Any = {"device": ranks.device, "dtype": DTYPES[ranks.device.type]}
        sizes = size.hidden, size.ffn, size.experts, size.top_k
        layer = BalancedMoE.swiglu(*sizes, balancer=none, **kind)
        layer.router = self.router = GivenRoutes()
        self.layers = {NONE: layer, AGAIN: layer}
        self.layers[BALANCED] = BalancedMoE(self.router, layer.experts, balancer=balanced)
        generator = torch.Generator().manual_seed(ranks.place.rank)
        self.tokens = torch.randn(size.tokens, size.hidden, generator=generator).to(**kind)

    def step(self, name: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run forward and backward; return outputs and gradients."""
        layer, self.router.ids = self.layers[name], ids
        x = self.tokens[: len(ids)].detach().requires_grad_()
        layer.zero_grad(set_to_none=True)
        y = layer(x)
        y.backward(y.detach())
        results = {"outputs": y.detach(), "gradients of tokens": x.grad}
        results |= {name: weight.grad for name, weight in layer.experts.named_parameters()}
        return {what: tensor for what, tensor in results.items() if tensor is not None}

    @property
    def replicas(self) -> int:
        """Replicas of the last balanced step."""
        plan = self.layers[BALANCED].last_plan
        return 0 if plan is None else plan.to_host().num_replicas

    def close(self) -> None:
        for name in (NONE, BALANCED):
            self.layers[name].balancer.close()


def compare(size: LayerSize, dispatcher: str, ranks: Ranks) -> Facts:
    """Compare outputs and gradients of balanced steps with steps without balancing."""
    config = BalanceConfig(objective="balance")  # replicates at any size
    layers, place = CheckedLayers(size, dispatcher, ranks, config), ranks.place
    hot = ids_of(size, place.rank, place.size, 1.0)
    hot[~(hot == 0).any(dim=1), -1] = 0  # no token has an expert twice
    empty = ids_of(size, place.rank, place.size, 1.5)
    cases = {HOT: hot, EMPTY: empty[:0] if place.rank == place.size - 1 else empty}
    facts: Facts = {"errors": {}, "replicas": {}, "limit": LIMITS[ranks.device.type]}
    for case, ids in cases.items():
        expected, results = (layers.step(name, ids.to(ranks.device)) for name in (NONE, BALANCED))
        errors = [_distance(results[what], expected[what]) for what in expected]
        facts["errors"][case], facts["replicas"][case] = max(errors), layers.replicas
    ranks.connected.gather_objects(None)
    layers.close()
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
    """Time steps without and with balancing at several imbalances."""
    layers, place = CheckedLayers(size, dispatcher, ranks, BalanceConfig()), ranks.place
    facts: Facts = {"seconds": {}, "replicas": {}, "loads": {}}
    for imbalance, count in ROUNDS.items():
        ids, case = ids_of(size, place.rank, place.size, imbalance), str(imbalance)
        facts["loads"][case] = torch.bincount(ids.flatten(), minlength=size.experts).tolist()
        names = (NONE, BALANCED, AGAIN)[: 3 if imbalance == 1 else 2]
        facts["seconds"][case] = _rounds(layers, ids.to(ranks.device), names, count, ranks)
        facts["replicas"][case] = layers.replicas
    facts["balancer"] = str(layers.layers[BALANCED].balancer)
    layers.close()
    return facts


def _rounds(
    layers: CheckedLayers, ids: torch.Tensor, names: Sequence[str], count: int, ranks: Ranks
) -> dict[str, list[float]]:
    """Return the seconds of a step of the slowest rank, in every round.

    Rounds run through all orders of the layers, so that no layer always follows the same one.
    """
    device, orders = ranks.device, list(permutations(names))
    rounds: dict[str, list[float]] = {name: [] for name in names}
    steps, spent = STEPS[device.type], 0.0

    def run_steps(name: str) -> None:
        for _ in range(steps):
            layers.step(name, ids)

    for turn in range(WARMUP + count):
        for name in orders[turn % len(orders)]:
            (seconds,) = seconds_of(partial(run_steps, name), ranks.connected, device, 1)
            slowest = max(ranks.connected.gather_objects(seconds))
            rounds[name].append(slowest / steps)
            spent += slowest
        if turn >= WARMUP + LEAST and spent > LONGEST:  # the same on all ranks
            break
    return {name: seconds[WARMUP:] for name, seconds in rounds.items()}


def ratio_of(seconds: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return the median over rounds of the ratio within a round, and the range of its quartiles."""
    low, middle, high = quantiles(map(truediv, seconds, others))
    return middle, high - low


def idle_cost(seconds: dict[str, list[float]]) -> tuple[float, float]:
    """Return how much longer a balanced step takes with even routing, and the resolution.

    The resolution is twice the standard error of the median, as of a normal distribution, or the
    difference between two timings of the same layer, if that is larger.
    """
    cost, spread = ratio_of(seconds[BALANCED], seconds[NONE])
    again, spread_again = ratio_of(seconds[AGAIN], seconds[NONE])
    error = 2 * 1.253 / 1.349 * max(spread, spread_again) / len(seconds[NONE]) ** 0.5
    return cost - 1, max(error, abs(again - 1))


def judge_times(size: LayerSize, domain: int, facts: Sequence[Facts]) -> Finding:
    timed, replicas, gains = facts[0]["seconds"], facts[0]["replicas"], {}
    finding = Finding("times", f"forward and backward, {size}")
    finding.table = [["imbalance", "ms without", "ms balanced", "gain", "predicted", "replicas"]]
    even, spread = median(timed["1.0"][NONE]), 0.0
    for case, seconds in timed.items():
        gains[case], quartiles = ratio_of(seconds[NONE], seconds[BALANCED])
        spread = max(spread, quartiles)
        loads_RE = np.array([own["loads"][case] for own in facts])
        predicted = predicted_gain(size, domain, loads_RE, even)
        times = (f"{1e3 * median(seconds[name]):.1f}" for name in (NONE, BALANCED))
        ratios = f"{gains[case]:.2f}x", f"{predicted:.2f}x"
        finding.table.append([case, *times, *ratios, str(replicas[case])])
    cost, resolution = idle_cost(timed["1.0"])
    finding.notes = [
        "predicted: by the simulator, with the speed fitted to imbalance 1",
        f"idle cost at imbalance 1: {100 * cost:+.1f} %, resolution {100 * resolution:.1f} %",
    ]
    finding.facts = {"size": asdict(size), "gains": gains, "ranks": list(facts)}
    finding.facts |= {"idle_cost": cost, "resolution": resolution}
    if spread > MOST_SPREAD:
        finding.warnings.append(
            f"rounds differ by {100 * spread:.0f} %: repeat the check on idle hosts"
        )
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
