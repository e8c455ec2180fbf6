"""The published settings, simulated: what the paper reports beside what the clock says."""

from __future__ import annotations

from dataclasses import dataclass

from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.costs import Reached, measured_rates
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.presets import as_record, presets
from ultraep.tools.sim.run import Result
from ultraep.tools.sim.scenario import Contender, Scenario
from ultraep.tools.sim.serving import Serving, load_requests
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import calibrated_noise, fit_skew
from ultraep.topology import Topology

CLUSTER = "gb200-nvl72"
# Spare slots: two in the published recipe; the published imbalance of LPLB is nearest with one.
CONTENDERS = (
    Contender.of("none"),
    Contender("eplb", "eplb", slots=2),
    Contender("lplb", "lplb", slots=1),
    Contender("quota", "quota", slots=2),
    Contender("ultraep", "ultraep", slots=1),
    Contender.of("ideal"),
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
    requests: str = ""

    @property
    def training(self) -> bool:
        """Whether a model is trained; else requests are prefilled."""
        return not self.requests

    def share(self, policy: str) -> float:
        """Published throughput over that of forced balance."""
        return self.throughput[policy] / self.throughput["ideal"]


def settings() -> list[Setting]:
    """All published settings."""
    return [
        as_record(Setting, {"name": name, **table}, f"setting {name}")
        for name, table in presets("published").items()
    ]


def scenario_of(
    setting: Setting,
    *,
    noise: float | None = None,
    rates: Reached | None = None,
    steps: int = 2,
    seed: int = 0,
) -> Scenario:
    """Return a setting with loads of the published imbalance; noise and rates as calibrated."""
    model = load_model(setting.model)
    job: Training | Serving
    if setting.training:
        job = Training(
            tokens=setting.tokens,
            sequence=setting.tokens,
            pipeline=setting.pipeline,
            groups=setting.groups,
            microbatches=setting.microbatches,
            steps=steps,
        )
    else:
        job = Serving(requests=load_requests(setting.requests), chunk=setting.tokens, seed=seed)
    workload = fit_skew(
        setting.imbalance["none"],
        Topology(ranks=setting.ranks, experts=model.experts),
        model.top_k,
        range(model.dense_layers, model.layers),
        noise=calibrated_noise(training=setting.training) if noise is None else noise,
        seed=seed,
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
    """Throughput of every contender over that of the last one, forced balance."""
    return {result.label: result.throughput / results[-1].throughput for result in results}
