"""Runtime: how the plans of a policy are carried out, and what that costs (data/runtimes.toml)."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.sim.presets import as_record, presets


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


def runtime_of(policy: str) -> Runtime:
    """The runtime of a policy; one without its own is carried out as `ultraep` is."""
    tables = presets("runtimes")
    name = {"ideal": "none"}.get(policy, policy)
    table = {**tables.get(name, tables["ultraep"]), **_calibrated(name)}
    return as_record(Runtime, {"name": policy, **table}, f"runtime of {policy}")


def _calibrated(name: str) -> dict[str, float]:
    """What of a runtime is known by calibration only."""
    found = presets("calibrated").get(name, {}) if name in ("eplb", "lplb") else {}
    return {key: value for key, value in found.items() if key.endswith("_us")}
