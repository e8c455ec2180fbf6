"""Runtime: how the plans of a policy are carried out, and what that costs (data/runtimes.toml)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep.tools.sim.presets import as_record, presets

NONE, IDEAL = "none", "ideal"


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Who pays what for a plan. `data/runtimes.toml` explains the fields and gives sources."""

    name: str
    planner: str  # measured, given
    relay: str  # nothing, placed, direct, chain, auto, tree
    beside: bool
    kept: bool
    plan_us: float
    layer_us: float
    backward_us: float
    hidden: str  # experts, attention
    reduce_gb_s: float
    source: str

    @property
    def streams(self) -> bool:
        """Whether weights travel in every pass."""
        return self.relay in ("direct", "chain", "auto", "tree")


def price(policy: str, runtime: Runtime | None = None) -> Runtime:
    """The runtime of a policy, or one that was chosen for it, if its plans can be priced so."""
    known = get_policy(policy)
    runtime = runtime or runtime_of(policy)
    why = None
    if runtime.streams and not known.within_limits:
        why = "it copies beyond spare slots and domains"
    elif runtime.relay == "placed" and not known.needs_history:
        why = "it copies anew in every microbatch, and there copies stay"
    elif runtime.relay == "nothing" and policy not in (NONE, IDEAL):
        why = "there nothing is copied"
    if why:
        raise ConfigError(
            f"policy {policy} cannot be priced as {runtime.name}: {why}; "
            "`ultraep plan` compares its plans"
        )
    return runtime


def runtime_of(policy: str) -> Runtime:
    """Return the runtime of a policy; raise `ConfigError` if its costs are unknown."""
    tables = presets("runtimes")
    name = {IDEAL: NONE}.get(policy, policy)
    if name not in tables:
        raise ConfigError(
            f"policy {policy!r} has no costs of its own, only {', '.join([*tables, IDEAL])} "
            f"have: name the one whose costs it shall have, {policy}=NAME"
        )
    table = {**tables[name], **_calibrated(name)}
    return as_record(Runtime, {"name": policy, **table}, f"runtime of {policy}")


def _calibrated(name: str) -> dict[str, float]:
    """What of a runtime is known by calibration only."""
    table = presets("calibrated").get(name, {})
    return {key: value for key, value in table.items() if key.endswith("_us")}
