"""The page that paper.py writes, and its studies: what changes with every knob of the simulator."""
# ruff: noqa: E501  (prose)

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from published import CLUSTER, CONTENDERS, scenario_of, settings

from ultraep.files.writing import whole_file, write_text
from ultraep.topology import Topology
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.run import Result, simulate
from ultraep_tools.sim.runtime import Contender, runtime_of
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import fit_skew

NONE, IDEAL = CONTENDERS[0], CONTENDERS[-1]
OURS = Contender("ultraep", "ultraep")
Case = tuple[str, Scenario, Contender]


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    layers: int | None  # of every model; None: all
    steps: int
    processes: int
    points: int  # of a study, at most
    settings: int | None = None  # published ones; None: all

    def cut(self, scenario: Scenario) -> Scenario:
        """The same scenario with fewer layers, and accordingly less time to wait for them."""
        if self.layers is None:
            return scenario
        model = replace(scenario.model, layers=self.layers, dense_layers=0)
        job = scenario.job
        if isinstance(job, Serving):
            limit = job.requests.limit_s * self.layers / scenario.model.layers
            job = replace(job, requests=replace(job.requests, limit_s=limit))
        return replace(scenario, model=model, job=job)

    def run(self, scenario: Scenario, contenders: Sequence[Contender]) -> list[Result]:
        return simulate(self.cut(scenario), contenders, processes=self.processes)


FULL = Effort(layers=None, steps=2, processes=2, points=99)
TOY = Effort(layers=4, steps=1, processes=1, points=1, settings=2)


class Page:
    """Markdown, and pictures beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[str] = []

    def text(self, *lines: str) -> None:
        self.parts.append("\n".join(lines) + "\n")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        lines = [head, ["---"] * len(head), *rows]
        self.parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")

    def picture(self, name: str, what: str, draw: Callable[[Any], None], width: float = 7) -> None:
        """Draw into one picture; the same figures give the same bytes."""
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        mpl.rcParams.update({"svg.hashsalt": "ultraep", "font.size": 9})
        figure, axes = plt.subplots(figsize=(width, 2.8), layout="constrained")
        draw(axes)
        with whole_file(self.folder / f"{name}.svg") as file:
            figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
        self.parts.append(f"![{what}]({name}.svg)\n")

    def write(self) -> None:
        write_text(self.folder / "paper.md", "\n".join(self.parts))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def base(effort: Effort, **changes: Any) -> Scenario:
    """Qwen3-235B training as published, one group, less of it."""
    setting = next(setting for setting in settings() if setting.name == "qwen-train")
    scenario = scenario_of(replace(setting, groups=1), steps=effort.steps)
    return replace(scenario, **changes)


def study(
    page: Page, effort: Effort, title: str, text: str, cases: Sequence[Case], *, picture: str = ""
) -> None:
    """A table with one line per case, and a picture of both shares if it has a name."""
    rows = []
    shares: list[tuple[str, float, float]] = []
    for name, scenario, contender in cases[: effort.points]:
        none, mine, ideal = effort.run(scenario, [NONE, contender, IDEAL])
        before, after = none.throughput / ideal.throughput, mine.throughput / ideal.throughput
        shares.append((name, before, after))
        numbers = [f"{none.imbalance:.2f}", f"{mine.imbalance:.3f}", f"{mine.copies:.0f}"]
        numbers += [percent(before), percent(after), f"{mine.throughput / none.throughput:.2f}x"]
        rows.append([name, *numbers, f"{mine.memory.total / 1e9:.0f}"])
    page.text(f"### {title}", "", text)
    head = ["", "imbalance before", "after", "replicas", "none, share", "share", "over none", "GB"]
    page.table(head, rows)
    if picture:
        page.picture(picture, title, lambda axes: draw_shares(axes, shares))


def draw_shares(axes: Any, shares: list[tuple[str, float, float]]) -> None:
    """Both shares over the cases."""
    for index, (name, colour) in enumerate((("none", "#b0b0b0"), ("ultraep", "#c14a4a")), start=1):
        values = [100 * row[index] for row in shares]
        axes.plot(range(len(shares)), values, "o-", color=colour, label=name)
    axes.set_xticks(range(len(shares)), [row[0] for row in shares])
    axes.set_ylabel("% of forced balance")
    axes.set_ylim(0, 108)
    axes.legend(frameon=False)


def studies(page: Page, effort: Effort) -> None:
    """What changes with every knob."""
    page.text(
        "## Sensitivity",
        "",
        "Qwen3-235B training, EP64, GB200 NVL72, 8192 tokens per rank, imbalance 2.86, one slot and "
        "tolerance 0.01 unless stated otherwise. GB: memory of the busiest device.",
    )
    start = base(effort)
    slots = [
        (f"{count} slots" if count != 1 else "1 slot", start, replace(OURS, slots=count))
        for count in range(5)
    ]
    add = partial(study, page, effort)
    add("Spare slots", "One slot is enough: more slots gain nothing.", slots)
    tolerances = [
        (f"{value:g}", start, replace(OURS, tolerance=value))
        for value in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
    ]
    text = "Exact balance needs the most replicas. Allowing one percent above the mean saves more than it costs."
    add("Tolerance", text, tolerances)
    tokens = [
        (f"{count}", replace(start, job=training_of(start, tokens=count)), OURS)
        for count in (256, 512, 1024, 2048, 4096, 8192, 16384)
    ]
    text = "Replicas cost the same with few tokens. "
    text += "With 256 tokens they cost more than they save."
    add("Tokens per rank", text, tokens, picture="tokens")
    relays = [
        (mode, start, replace(OURS, runtime=replace(runtime_of("ultraep"), relay=mode)))
        for mode in ("direct", "chain", "auto")
    ]
    add("Relays", "`direct`: relays off.", relays)
    text = "Replicas stay in the domain of their home. Rows between domains use the network, which limits every policy. "
    text += "H200 with NVLink domains of 8, then GB200 devices in domains of several sizes; "
    text += "400 Gbit/s per device between domains."
    add("Domain smaller than the group", text, domains(effort))
    links = [
        (f"{rate} GB/s", replace(start, cluster=replace(start.cluster, link_gb_s=rate)), OURS)
        for rate in (100, 225, 450, 900, 1800)
    ]
    add("Rate of the fast link", "Rows and weights share the link.", links, picture="links")


def domains(effort: Effort) -> list[Case]:
    start = base(effort)
    h200 = replace(start, cluster=load_cluster("h200-nvl8"), job=training_of(start, pipeline=1))
    racks = [
        (f"GB200, domains of {size}", replace(start, domain=size), OURS) for size in (8, 16, 32, 64)
    ]
    return [("H200, domains of 8", h200, OURS), *racks]


def training_of(scenario: Scenario, **changes: Any) -> Training:
    assert isinstance(scenario.job, Training)
    if "tokens" in changes:
        changes["sequence"] = changes["tokens"]
    return replace(scenario.job, **changes)


def scaling(page: Page, effort: Effort) -> None:
    """More groups, and larger groups."""
    page.text("## Scaling")
    start = base(effort)
    groups = [
        (f"{64 * count}", replace(start, job=training_of(start, groups=count)), OURS)
        for count in (1, 4, 10, 20, 40)
    ]
    text = "Devices in the first column. A step waits for its slowest group."
    study(page, effort, "Data-parallel groups of EP64, up to 2,560 devices", text, groups)
    text = "DeepSeek-V3 with its experts cut into quarters (1,024 experts, top-32, the same weights in all), "
    text += "on a GB200-like cluster whose fast link joins all ranks. The router has the same skew everywhere (imbalance 2 at EP64). With more ranks, each rank has fewer experts, so the imbalance grows."
    study(page, effort, "Ranks of a group, up to EP1024", text, wide(effort), picture="ranks")


def wide(effort: Effort) -> list[Case]:
    whole = load_model("deepseek-v3-671b")
    model = replace(whole, name="deepseek-v3-quarters", experts=1024, top_k=32, expert_width=512)
    layers = range(model.dense_layers, effort.layers or model.layers)
    skew = fit_skew(2.0, Topology(ranks=64, experts=1024), 32, layers, noise=0.25)
    cluster = replace(load_cluster(CLUSTER), domain=1024, title="GB200-like, one fast link for all")
    job = Training(tokens=4096, sequence=4096, pipeline=4, microbatches=4, steps=effort.steps)
    widest = Scenario(cluster=cluster, model=model, workload=skew, job=job, ranks=1024)
    return [
        (f"EP{ranks}", replace(widest, ranks=ranks), OURS)
        for ranks in (32, 64, 128, 256, 512, 1024)
    ]
