"""A transformers model in the engine of the demo: part of `bench_prefill.py`.

Shapes: n prompts, T tokens, K experts per token, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch

from ultraep.errors import NothingToBalance
from ultraep.runtime.balancer import Balancer
from ultraep_tools.demo.even import EvenTurns
from ultraep_tools.demo.prefill import packed

NONE, FORCED = "none", "even"  # FORCED: forced even routing, without balancing
ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")  # of transformers' experts


class ReplacedChoices:
    """A hook for transformers' experts that replaces the router's choices while it is `on`.

    replace: maps `[T, K]` choices to others; tokens and gates stay.
    """

    def __init__(self, replace: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.replace, self.on = replace, False

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with other choices; None leaves them unchanged."""
        if not self.on:
            return None
        named = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        named["top_k_index"] = self.replace(named["top_k_index"])
        return (), named


def add_hook(model: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> ReplacedChoices:
    """Add a hook to all experts, which runs before their other hooks."""
    from ultraep.integrations.transformers.balance import registered_experts

    hook = ReplacedChoices(replace)
    for module in registered_experts(model).values():
        module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return hook


class ServedTransformers:
    """A model of transformers, unmodified or balanced with the policy "none"."""

    def __init__(self, model: Any) -> None:
        from ultraep.integrations.transformers import balanced_experts

        self.model = model.eval()
        self.device = next(model.parameters()).device
        self._modules = list(balanced_experts(model).values())
        self._balancers = {NONE: [module.balancer for module in self._modules]}
        self._even = []
        for module in self._modules:
            even = EvenTurns(module.balancer.topology, module.balancer.rank)
            self._even.append(ReplacedChoices(even.replace))
            module.register_forward_pre_hook(self._even[-1], with_kwargs=True)

    def use(self, policy: str) -> list[Balancer]:
        """Plan by this policy, or force even routing; return the balancers. Collective.

        Every policy has its own balancers: a GPU plans by the first policy of its balancer only.
        """
        for choices in self._even:
            choices.on = policy == FORCED
        policy = NONE if policy == FORCED or not self._modules else policy
        if policy not in self._balancers:
            first = self._balancers[NONE]
            new = {balancer: with_policy(balancer, policy) for balancer in dict.fromkeys(first)}
            for balancer in first:
                new[balancer].register_layer()
            self._balancers[policy] = [new[balancer] for balancer in first]
        for module, balancer in zip(self._modules, self._balancers[policy], strict=True):
            module.balancer = balancer
        return list(dict.fromkeys(self._balancers[policy]))

    def close(self) -> None:
        for policy in self._balancers:
            for balancer in self.use(policy):
                balancer.close()

    def first_tokens(self, texts: Sequence[torch.Tensor]) -> list[int]:
        first: list[int] = self.last_logits(texts).argmax(dim=-1).tolist()
        return first

    @torch.inference_mode()
    def last_logits(self, texts: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, V] logits after every text; the texts are packed into one sequence.

        A rank without texts runs one token, because attention needs at least one.
        """
        tokens, positions, ends = packed(texts or [torch.zeros(1, dtype=torch.int64)])
        logits: torch.Tensor = self.model(
            input_ids=tokens.to(self.device),
            position_ids=positions.to(self.device),
            logits_to_keep=ends.to(self.device),
            use_cache=False,
        ).logits[0]
        return logits[: len(texts)]


def with_policy(balancer: Balancer, policy: str) -> Balancer:
    """Return a new balancer with this policy and the settings of another one. Collective."""
    topology, settings = balancer.topology, balancer.settings
    options = {field.name: getattr(settings, field.name) for field in fields(settings)}
    options |= {"experts": topology.homes or topology.experts, "slots": topology.slots}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToBalance)  # of one rank, or without slots
        return Balancer._with_settings(balancer.group, policy=policy, **options)
