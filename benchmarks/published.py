"""Settings of the published evaluation, as scenarios of the simulator."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from harness import ROOT

from ultraep.topology import Topology
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.costs import MeasuredRates, measured_rates
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.run import Result
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import fit_skew, noise_of

CLUSTER = "gb200-nvl72"
# Two spare slots as in the published recipe; one for LPLB, which fits its published imbalance best.
CONTENDERS = (
    Contender("none"),
    Contender("eplb", slots=2),
    Contender("lplb", slots=1),
    Contender("quota", slots=2),
    Contender("ultraep", slots=1),
    Contender("ideal"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of the published evaluation."""

    name: str
    title: str
    use: str  # calibrate, hold back
    model: str
    ranks: int
    throughput: dict[str, float]
    imbalance: dict[str, float]
    tokens: int = 8192
    pipeline: int = 1
    groups: int = 1
    microbatches: int = 1

    def share(self, policy: str) -> float:
        """Published throughput over forced balance."""
        return self.throughput[policy] / self.throughput["ideal"]


def settings() -> list[Setting]:
    """Return all published settings."""
    tables = tomllib.loads((ROOT / "benchmarks" / "published.toml").read_text("utf-8"))
    return [Setting(name=name, **table) for name, table in tables.items()]


def scenario_of(
    setting: Setting,
    *,
    noise: float | None = None,
    rates: MeasuredRates | None = None,
    steps: int = 2,
) -> Scenario:
    """Return a setting with loads of the published imbalance; noise and rates as calibrated."""
    model = load_model(setting.model)
    sizes = {name: getattr(setting, name) for name in ("pipeline", "groups", "microbatches")}
    job = Training(tokens=setting.tokens, sequence=setting.tokens, steps=steps, **sizes)
    workload = fit_skew(
        setting.imbalance["none"],
        Topology(ranks=setting.ranks, experts=model.experts),
        model.top_k,
        model.expert_layers,
        noise=noise_of(training=True) if noise is None else noise,
    )
    return Scenario(
        cluster=load_cluster(CLUSTER),
        model=model,
        workload=workload,
        job=job,
        ranks=setting.ranks,
        rates=rates or measured_rates(),
    )


def share_of_ideal(results: list[Result]) -> dict[str, float]:
    """Throughput of every contender over the last one, forced balance."""
    return {result.policy: result.throughput / results[-1].throughput for result in results}
