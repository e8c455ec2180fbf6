"""Write docs/results/paper.md: the published evaluation beside what the simulator says.

    make paper                                    # some minutes
    python benchmarks/paper.py --toy --out /tmp/x # few layers, for CI

Tables: the published settings (throughput, share of forced balance, imbalance, predicted and
published), how well predictions fit where something was measured, the exposed cost of a layer,
scaling in groups and in ranks, and what changes with slots, tolerance, tokens, domains, links and
relays. Everything is seeded; the same versions write the same text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_sim
import numpy as np
from harness import ROOT, Line, versions

from ultraep.outputs import whole_file, write_text
from ultraep.sim.cluster import load_cluster
from ultraep.sim.model import load_model
from ultraep.sim.published import (
    CLUSTER,
    CONTENDERS,
    Setting,
    scenario_of,
    settings,
    share_of_ideal,
)
from ultraep.sim.run import Result, simulate
from ultraep.sim.runtime import runtime_of
from ultraep.sim.scenario import Contender, Scenario
from ultraep.sim.serving import Serving
from ultraep.sim.training import Training
from ultraep.sim.workload import fit_skew
from ultraep.topology import Topology

NONE, IDEAL = CONTENDERS[0], CONTENDERS[-1]
OURS = Contender("ultraep", "ultraep")
THEIRS = Contender("quota", "quota", slots=2)
NAMES = {"quota": "UltraEP as published (`quota`)", "ultraep": "**`ultraep`, one slot**"}
WITHIN = 5.0  # points


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    layers: int | None  # of every model; None: all
    steps: int
    processes: int
    points: int  # of a study, at most

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
TOY = Effort(layers=4, steps=1, processes=1, points=2)


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


# -- the published settings ----------------------------------------------------------------------


def published(page: Page, effort: Effort) -> None:
    """Every setting: published beside simulated."""
    found = []
    for setting in settings():
        results = effort.run(scenario_of(setting, steps=effort.steps), CONTENDERS)
        found.append((setting, results))
    page.text(
        "## The published settings",
        "",
        "Share: throughput over that of forced balance. Published throughput is TFLOP/s per device in "
        "training and requests/s at the limit of the mean time to the first token in serving. "
        "Settings marked *calibrate* gave the constants of `calibrated.toml`; the others are held back.",
    )
    for setting, results in found:
        setting_table(page, setting, results)
    picture_of_shares(page, found)
    ours(page, found)
    errors(page, found)
    exposed(page, found)


def setting_table(page: Page, setting: Setting, results: list[Result]) -> None:
    shares = share_of_ideal(results)
    page.text(f"### {setting.title} (EP{setting.ranks}, {setting.use})")
    rows = []
    for result in results:
        known = result.policy in setting.throughput
        mine = shares[result.label]
        rows.append(
            [
                NAMES.get(result.policy, f"`{result.policy}`"),
                f"{setting.throughput[result.policy]:g}" if known else "-",
                f"{result.throughput:.0f}",
                percent(setting.share(result.policy)) if known else "-",
                percent(mine),
                f"{100 * (mine - setting.share(result.policy)):+.1f}" if known else "-",
                f"{result.throughput / results[0].throughput:.2f}x",
                f"{setting.imbalance.get(result.policy, 1.0):.2f}" if known else "-",
                f"{result.imbalance:.2f}",
                f"{result.copies:.0f}",
            ]
        )
    head = "policy, published, simulated, share published, share simulated, points, over none, "
    head += "imbalance published, simulated, copies"
    page.table(head.split(", "), rows)


def picture_of_shares(page: Page, found: list[tuple[Setting, list[Result]]]) -> None:
    def draw(axes: Any) -> None:
        colours = {"none": "#b0b0b0", "eplb": "#d8a657", "lplb": "#a9b665", "quota": "#7daea3"}
        for index, (setting, results) in enumerate(found):
            shares = share_of_ideal(results)
            for place, result in enumerate(results[:-1]):
                x = index + (place - 2) * 0.16
                colour = colours.get(result.policy, "#c14a4a")
                label = result.policy if index == 0 else None
                axes.bar(x, 100 * shares[result.label], 0.15, color=colour, label=label)
                if result.policy in setting.throughput:
                    axes.plot(x, 100 * setting.share(result.policy), "k_", markersize=7)
        axes.set_xticks(range(len(found)), [s.title.replace(" ", "\n", 1) for s, _ in found])
        axes.tick_params(axis="x", labelsize=7)
        axes.set_ylabel("% of forced balance")
        axes.set_ylim(0, 108)
        axes.legend(ncols=5, loc="upper center", fontsize=7, frameon=False)

    what = "Share of forced balance in seven settings: bars simulated, marks published"
    page.picture("shares", what, draw, width=9)
    page.text("Bars: simulated. Marks: published.")


def ours(page: Page, found: list[tuple[Setting, list[Result]]]) -> None:
    def means(label: str) -> tuple[float, float]:
        shares = [share_of_ideal(results)[label] for _, results in found]
        gains = [
            by_label(results)[label].throughput / results[0].throughput for _, results in found
        ]
        return float(np.mean(shares)), float(np.mean(gains))

    paper = np.mean([setting.share("quota") for setting, _ in found])
    paper_gain = np.mean([s.throughput["quota"] / s.throughput["none"] for s, _ in found])
    rows = [
        ["published, two slots", percent(float(paper)), f"{paper_gain:.2f}x"],
        *(
            [name, percent(means(label)[0]), f"{means(label)[1]:.2f}x"]
            for name, label in (
                ("`quota` simulated, two slots", "quota"),
                ("**`ultraep` simulated, one slot, tolerance 0.01**", "ultraep"),
            )
        ),
    ]
    page.text("### Mean over the seven settings")
    page.table(["", "share of forced balance", "over none"], rows)


def errors(page: Page, found: list[tuple[Setting, list[Result]]]) -> None:
    """How many ratios fit, and what the published ones imply."""
    page.text("## How well it fits")
    counts: dict[str, list[float]] = {"calibrate": [], "hold back": []}
    wrong = []
    for setting, results in found:
        shares = share_of_ideal(results)
        known = [result for result in results[:-1] if result.policy in setting.throughput]
        counts[setting.use] += [100 * abs(shares[r.label] - setting.share(r.policy)) for r in known]
        wrong += swapped(setting, known)
    rows = [
        [
            use,
            str(len(off)),
            str(sum(error <= WITHIN for error in off)),
            f"{np.mean(off):.1f}",
            f"{max(off):.1f}",
        ]
        for use, off in counts.items()
    ]
    page.table(
        ["settings", "ratios", f"within {WITHIN:g} points", "mean error, points", "largest"], rows
    )
    if wrong:
        page.text("Pairs of policies that stand the other way round than published:")
        page.text(*(f"- {pair}" for pair in wrong))
    implied(page, found)


def swapped(setting: Setting, known: list[Result]) -> list[str]:
    """Pairs whose order differs from the published one."""
    found = []
    for index, one in enumerate(known):
        for two in known[index + 1 :]:
            gap = setting.throughput[one.policy] - setting.throughput[two.policy]
            if gap * (one.throughput - two.throughput) < 0:
                found.append(
                    f"{setting.title}: `{one.policy}` and `{two.policy}` "
                    f"(published {setting.throughput[one.policy]:g} and "
                    f"{setting.throughput[two.policy]:g})"
                )
    return found


def implied(page: Page, found: list[tuple[Setting, list[Result]]]) -> None:
    """The part of the time that grows with the fullest rank, if time is linear in it."""

    def part(gain: float, imbalance: float) -> float:
        return (gain - 1) / (imbalance - 1)

    rows = []
    for setting, results in found:
        none, ideal = results[0], results[-1]
        pairs = [
            part(1 / setting.share(policy), setting.imbalance[policy])
            for policy in ("none", "eplb")
        ]
        simulated = part(ideal.throughput / none.throughput, none.imbalance)
        rows.append([setting.title, *(f"{value:.2f}" for value in pairs), f"{simulated:.2f}"])
    page.text(
        "What the published figures imply: if the time of a step is a part that does not depend on the "
        "balance and a part that grows with the fullest rank, `none` and `EPLB` each say how large the "
        "latter is. One model on one kind of work has one such part; where two published columns, or two "
        "models of nearly the same shape, disagree by a factor, no model of this kind can meet both.",
    )
    page.table(["setting", "by none, published", "by EPLB, published", "by none, simulated"], rows)


def exposed(page: Page, found: list[tuple[Setting, list[Result]]]) -> None:
    """What a layer pays for balancing, forward."""
    rows = []
    for setting, results in found:
        layers = load_model(setting.model).moe_layers
        labels = by_label(results)
        cells = [setting.title]
        for label in ("quota", "ultraep"):
            stages = labels[label].stages
            weights = stages["replicate"] + stages["reroute"]
            parts = [s / layers * 1e6 for s in (stages["loads"], stages["plan"], weights)]
            cells += [f"{sum(parts):.0f}", " + ".join(f"{us:.0f}" for us in parts)]
        rows.append(cells)
    page.text(
        "## Exposed on the critical path",
        "",
        "Microseconds of one layer, forward: loads + plan + weights (with the reroute). Published for "
        "EP64: 252 to 300.",
    )
    page.table(["setting", "`quota`", "of it", "`ultraep`", "of it"], rows)


# -- where something was measured ----------------------------------------------------------------


def measured(page: Page) -> None:
    """Predictions beside our own measurements."""
    page.text(
        "## Predicted beside measured",
        "",
        "Share of forced balance of one layer, forward and backward: eight ranks on partitions of one "
        "H200, and two processes on two cores. Nothing was calibrated on the H200 runs; on the cores "
        "the one rate comes from forced balance. A dash: what was measured there was another plan. "
        "`python benchmarks/bench_sim.py`.",
    )
    report = Kept()
    bench_sim.on_card(report)  # type: ignore[arg-type]
    bench_sim.on_cpu(report)  # type: ignore[arg-type]
    for title, lines in report.tables:
        page.text(f"### {title.split(':')[0]}")
        rows = [
            [
                str(line.case["load"]),
                f"`{line.case['policy']}`",
                *(
                    "-" if value is None else f"{value:{metric.form}}"
                    for metric, value in line.values.items()
                ),
            ]
            for line in lines
        ]
        page.table(["load", "policy", "predicted", "measured", "points"], rows)


class Kept:
    """Takes the place of a report, and keeps its tables."""

    def __init__(self) -> None:
        self.section = ""
        self.tables: list[tuple[str, Sequence[Line]]] = []

    def add(self, title: str, lines: Sequence[Line]) -> None:
        self.tables.append((title, lines))


# -- studies -------------------------------------------------------------------------------------


def base(effort: Effort, **changes: Any) -> Scenario:
    """Qwen3-235B training as published, one group, less of it."""
    setting = next(setting for setting in settings() if setting.name == "qwen-train")
    scenario = scenario_of(replace(setting, groups=1), steps=effort.steps)
    return replace(scenario, **changes)


def study(
    page: Page,
    effort: Effort,
    title: str,
    text: str,
    cases: Sequence[tuple[str, Scenario, Contender]],
    *,
    picture: str = "",
) -> None:
    """A table with one line per case, and a picture of both shares if it has a name."""
    rows = []
    shares: list[tuple[str, float, float]] = []
    for name, scenario, contender in list(cases)[: effort.points]:
        none, mine, ideal = effort.run(scenario, [NONE, contender, IDEAL])
        rows.append(
            [
                name,
                f"{none.imbalance:.2f}",
                f"{mine.imbalance:.3f}",
                f"{mine.copies:.0f}",
                percent(none.throughput / ideal.throughput),
                percent(mine.throughput / ideal.throughput),
                f"{mine.throughput / none.throughput:.2f}x",
                f"{mine.memory.total / 1e9:.0f}",
            ]
        )
        shares.append(
            (name, none.throughput / ideal.throughput, mine.throughput / ideal.throughput)
        )
    page.text(f"### {title}", "", text)
    head = ["", "imbalance before", "after", "copies", "none, share", "share", "over none", "GB"]
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
        "## What it depends on",
        "",
        "Qwen3-235B training, EP64, GB200 NVL72, 8192 tokens a rank, imbalance 2.86, one slot, tolerance "
        "0.01, unless said otherwise. GB: what the fullest device needs.",
    )
    start = base(effort)
    slots = [
        (f"{count} slots" if count != 1 else "1 slot", start, replace(OURS, slots=count))
        for count in range(5)
    ]
    study(
        page, effort, "Spare slots", "With one slot there is nothing left to gain from more.", slots
    )
    tolerances = [
        (f"{value:g}", start, replace(OURS, tolerance=value))
        for value in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)
    ]
    study(
        page,
        effort,
        "Tolerance",
        "Exact balance needs most copies; a percent above the mean saves more than it costs.",
        tolerances,
    )
    tokens = [
        (f"{count}", replace(start, job=training_of(start, tokens=count)), OURS)
        for count in (256, 512, 1024, 2048, 4096, 8192, 16384)
    ]
    study(
        page,
        effort,
        "Tokens of a rank",
        "Copies cost the same for few tokens; below some thousand they eat what they save.",
        tokens,
        picture="tokens",
    )
    relays = [
        (mode, start, replace(OURS, runtime=replace(runtime_of("ultraep"), relay=mode)))
        for mode in ("direct", "chain", "auto")
    ]
    study(page, effort, "Relays", "`direct`: relays off.", relays)
    study(
        page,
        effort,
        "Domain smaller than the group",
        "Copies stay in the domain of their home; rows between domains go over the network, which "
        "becomes the limit for everyone. H200 with NVLink domains of 8, then GB200 devices in "
        "domains of several sizes; 400 Gbit/s per device beyond.",
        domains(effort),
    )
    links = [
        (f"{rate} GB/s", replace(start, cluster=replace(start.cluster, link_gb_s=rate)), OURS)
        for rate in (100, 225, 450, 900, 1800)
    ]
    text = "Rows and weights share it."
    study(page, effort, "Rate of the fast link", text, links, picture="links")


def domains(effort: Effort) -> list[tuple[str, Scenario, Contender]]:
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
    study(
        page,
        effort,
        "Data-parallel groups of EP64, up to 2,560 devices",
        "Devices in the first column. A step waits for its slowest group.",
        groups,
    )
    study(
        page,
        effort,
        "Ranks of a group, up to EP1024",
        "DeepSeek-V3 with its experts cut into quarters (1,024 experts, top-32, the same weights in all), "
        "on a GB200-like cluster whose fast link joins all ranks. The router's skew is the same "
        "everywhere (imbalance 2 at EP64): the more ranks, the fewer experts each has, and the worse it is.",
        wide(effort),
        picture="ranks",
    )


def wide(effort: Effort) -> list[tuple[str, Scenario, Contender]]:
    whole = load_model("deepseek-v3-671b")
    model = replace(whole, name="deepseek-v3-quarters", experts=1024, top_k=32, expert_width=512)
    layers = range(model.dense_layers, effort.layers or model.layers)
    skew = fit_skew(2.0, Topology(ranks=64, experts=1024), 32, layers, noise=0.25)
    cluster = replace(load_cluster(CLUSTER), domain=1024, title="GB200-like, one fast link for all")
    job = Training(tokens=4096, sequence=4096, pipeline=4, microbatches=4, steps=effort.steps)
    return [
        (
            f"EP{ranks}",
            Scenario(cluster=cluster, model=model, workload=skew, job=job, ranks=ranks),
            OURS,
        )
        for ranks in (32, 64, 128, 256, 512, 1024)
    ]


# -- the page ------------------------------------------------------------------------------------


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def by_label(results: list[Result]) -> dict[str, Result]:
    return {result.label: result for result in results}


def write(folder: Path, effort: Effort) -> None:
    """Everything, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(folder)
    known = versions()
    page.text(
        "# The published evaluation, simulated",
        "",
        "Written by `make paper` "
        f"(ultraep {known['ultraep']}, NumPy {known['numpy']}); "
        "[how the simulator works and how far it can be trusted](../simulator.md). "
        "All simulated figures are predictions for a GB200 NVL72, not measurements; what was measured "
        "stands in the section that says so.",
    )
    published(page, effort)
    measured(page)
    scaling(page, effort)
    studies(page, effort)
    page.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--toy", action="store_true", help="few layers and points, for CI")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results", help="folder")
    options = parser.parse_args()
    write(options.out, TOY if options.toy else FULL)
    print(f"wrote {options.out / 'paper.md'}")


if __name__ == "__main__":
    main()
