"""Runtime: what executing the plans of a policy costs. Contender: a policy in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep_tools.sim.presets import as_record, presets

NONE, IDEAL = "none", "ideal"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How plans are executed. `data/runtimes.toml` explains the fields and gives sources."""

    name: str
    source: str
    relay: str  # nothing, placed, auto, tree
    reduce_under: str  # experts, attention
    reduce_gb_s: float = 0.0
    plan_us: float | None = None
    layer_us: float = 0.0
    backward_us: float = 0.0
    overlaps_dispatch: bool = False
    reuses_weights: bool = False

    @property
    def streams(self) -> bool:
        """Whether weights of replicas are sent in every pass."""
        return self.relay in ("auto", "tree")


def runtime_of(policy: str) -> Runtime:
    """Return the runtime of a policy; raise `ConfigError` if its costs are unknown."""
    tables = presets("runtimes")
    name = NONE if policy == IDEAL else policy
    if name not in tables:
        raise ConfigError(
            f"policy {policy!r} has no costs of its own; costs are known for "
            f"{', '.join([*tables, IDEAL])}. Name one of them: {policy}=NAME"
        )
    calibrated = presets("calibrated").get(name, {})
    costs = {key: value for key, value in calibrated.items() if key.endswith("_us")}
    return as_record(Runtime, {"name": policy, **tables[name], **costs}, f"runtime of {policy}")


@dataclass(frozen=True)
class Contender:
    """A policy in a simulation. `None` means the default of the scenario or the policy."""

    policy: str
    slots: int | None = None
    runtime: Runtime | None = None

    def __post_init__(self) -> None:
        self.checked_runtime()

    @staticmethod
    def of(name: str) -> Contender:
        """Return the contender for NAME, or for NAME=OTHER.

        "echo=ultraep" plans with `echo` and prices the plans like plans of `ultraep`. Use it for
        policies without known costs.
        """
        policy, equals, priced_as = name.partition("=")
        if equals and not priced_as:
            raise ConfigError(f"NAME=OTHER needs two policies, got {name!r}")
        return Contender(policy, runtime=runtime_of(priced_as) if priced_as else None)

    @property
    def label(self) -> str:
        return self.policy if self.runtime is None else f"{self.policy}={self.runtime.name}"

    def checked_runtime(self) -> Runtime:
        """Return the runtime that executes the plans; raise `ConfigError` if it cannot."""
        policy = get_policy(self.policy)
        runtime = self.runtime or runtime_of(self.policy)
        reason = None
        if runtime.streams and not policy.within_limits:
            reason = "the policy replicates beyond spare slots and domains"
        elif runtime.relay == "placed" and not policy.needs_history:
            reason = "the policy replicates in every microbatch, but replicas of this runtime stay"
        elif runtime.relay == "nothing" and self.policy not in (NONE, IDEAL):
            reason = "this runtime does not replicate"
        if reason:
            raise ConfigError(
                f"policy {self.policy} cannot be priced as {runtime.name}: {reason}; "
                "`ultraep plan` compares its plans"
            )
        return runtime
