"""Runtime: what executing the plans of a policy costs. Contender: a policy in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep_tools.sim.presets import presets

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
    """Return the runtime that executes the plans of a policy.

    A policy without costs of its own has the costs of `eplb` if it plans from past loads, otherwise
    the costs of `ultraep`.
    """
    tables, registered = presets("runtimes"), get_policy(policy)
    if policy in tables:
        name = policy
    elif policy == IDEAL:
        name = NONE
    elif registered.needs_history:
        name = "eplb"
    elif registered.within_limits:
        name = "ultraep"
    else:
        raise ConfigError(
            f"policy {policy} cannot be simulated: it replicates beyond spare slots and domains; "
            "`ultraep plan` compares its plans"
        )
    calibrated = presets("calibrated").get(name, {})
    costs = {key: value for key, value in calibrated.items() if key.endswith("_us")}
    return Runtime(name=name, **tables[name] | costs)


@dataclass(frozen=True)
class Contender:
    """A policy in a simulation. `None` means the default of the scenario or the policy."""

    policy: str
    slots: int | None = None
    runtime: Runtime | None = None

    def __post_init__(self) -> None:
        runtime_of(self.policy)  # raises before any work
