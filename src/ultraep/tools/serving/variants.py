"""What is compared: policies of the balancer, EPLB with fixed homes, and forced even routing.

Shapes: T tokens, K experts per token, R ranks, E experts, C copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError
from ultraep.policies import Problem, get_policy, register_policy
from ultraep.policies.places import away_from_home, copied_items, split_equally
from ultraep.tools.tiny.even import EvenTurns
from ultraep.topology import Topology

NONE, EPLB, FORCED = "none", "eplb", "even"
AT_HOME = "eplb_at_home"
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of experts of transformers


def policy_of(variant: str) -> str:
    """The registered policy that plans for a variant."""
    return {EPLB: AT_HOME, FORCED: NONE}.get(variant, variant)


def check_variants(variants: Sequence[str]) -> None:
    """Refuse what cannot be run, by name."""
    for variant in variants:
        policy = get_policy(policy_of(variant))
        if not policy.within_limits:
            raise ConfigError(
                f"policy {variant!r} needs more slots than there are, or moves homes: it can be "
                f"compared (ultraep plan), not run; {EPLB!r} stands for EPLB with fixed homes"
            )


@register_policy(AT_HOME, needs_history=True)
def eplb_at_home(problem: Problem) -> IntArray:
    """EPLB with homes that stay: all slots filled by past loads, and loads split equally.

    Each copy goes to the expert with the largest past load per instance. Copies are then placed,
    heaviest first, on the least loaded rank of the domain that has a free slot and not the expert;
    a copy without such a rank is left out. `tolerance` has no effect.
    """
    assert problem.history is not None
    topology = problem.topology
    homes_E = topology.home_of_expert
    instances_ER = np.equal.outer(homes_E, np.arange(topology.ranks)).astype(np.int64)
    past_E = problem.history.astype(np.float32)
    slots = topology.ranks * topology.slots if past_E.any() else 0
    copied = copied_items(past_E, slots, most=topology.domain_size)
    share_E = past_E / (1 + np.bincount(copied, minlength=topology.experts)).astype(np.float32)
    load_R = np.bincount(homes_E, share_E, minlength=topology.ranks)
    left_R = np.full(topology.ranks, topology.slots)
    for expert in sorted(copied.tolist(), key=lambda expert: -share_E[expert]):
        near = np.arange(topology.ranks) // topology.domain_size
        free_R = (left_R > 0) & (instances_ER[expert] == 0) & (near == near[homes_E[expert]])
        if free_R.any():
            rank = int(np.where(free_R, load_R, np.inf).argmin())
            instances_ER[expert, rank] += 1
            load_R[rank] += share_E[expert]
            left_R[rank] -= 1
    split = split_equally(problem.expert_loads[None], instances_ER)
    return away_from_home(*split, topology)[:, 1:]


class EvenChoices:
    """A hook for experts of transformers: the same tokens and gates, with even choices.

    on: whether it does anything.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self._even, self.on = EvenTurns(topology, rank), False

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of the experts with even choices; None: unchanged."""
        if not self.on:
            return None
        named = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        named["top_k_index"] = self._even.chosen(named["top_k_index"])
        return (), named
