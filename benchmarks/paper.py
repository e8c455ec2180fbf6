"""Write docs/results/paper.md: the published evaluation next to the simulator's predictions.

    make paper                                    # some minutes
    python benchmarks/paper.py --toy --out /tmp/x # few layers, for CI

Tables: the published settings (throughput, share of forced balance, imbalance, predicted and
published), and predictions next to measurements. Everything is seeded; the same versions write the
same text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import bench_sim
import numpy as np
from harness import ROOT
from published import CONTENDERS, Setting, scenario_of, settings, share_of_ideal

from ultraep.files.writing import whole_file, write_text
from ultraep_tools.report.rows import versions
from ultraep_tools.sim.run import Result, simulate
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving

NAMES = {"quota": "UltraEP as published (`quota`)", "ultraep": "**`ultraep`, one slot**"}
WITHIN = 5.0  # points
Outcomes = list[tuple[Setting, list[Result]]]


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    layers: int | None  # of every model; None: all
    steps: int
    processes: int
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


FULL = Effort(layers=None, steps=2, processes=2)
TOY = Effort(layers=4, steps=1, processes=1, settings=2)


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


def published(page: Page, effort: Effort) -> None:
    """Every setting, published and simulated."""
    outcomes = [
        (setting, effort.run(scenario_of(setting, steps=effort.steps), CONTENDERS))
        for setting in settings()[: effort.settings]
    ]
    page.text(
        "## The published settings",
        "",
        "Share: throughput over forced balance. Published throughput is TFLOP/s per device in training, "
        "and requests/s at the limit of the mean time to first token in serving. The constants in "
        "`calibrated.toml` were fitted to the settings marked *calibrate*; the other settings are held back.",
    )
    for setting, results in outcomes:
        setting_table(page, setting, results)
    picture_of_shares(page, outcomes)
    ours(page, outcomes)
    errors(page, outcomes)


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
    head += "imbalance published, simulated, replicas"
    page.table(head.split(", "), rows)


def picture_of_shares(page: Page, outcomes: Outcomes) -> None:
    def draw(axes: Any) -> None:
        colours = {"none": "#b0b0b0", "eplb": "#d8a657", "lplb": "#a9b665", "quota": "#7daea3"}
        for index, (setting, results) in enumerate(outcomes):
            shares = share_of_ideal(results)
            for place, result in enumerate(results[:-1]):
                x = index + (place - 2) * 0.16
                colour = colours.get(result.policy, "#c14a4a")
                label = result.policy if index == 0 else None
                axes.bar(x, 100 * shares[result.label], 0.15, color=colour, label=label)
                if result.policy in setting.throughput:
                    axes.plot(x, 100 * setting.share(result.policy), "k_", markersize=7)
        axes.set_xticks(range(len(outcomes)), [s.title.replace(" ", "\n", 1) for s, _ in outcomes])
        axes.tick_params(axis="x", labelsize=7)
        axes.set_ylabel("% of forced balance")
        axes.set_ylim(0, 108)
        axes.legend(ncols=5, loc="upper center", fontsize=7, frameon=False)

    what = "Share of forced balance in seven settings: bars simulated, marks published"
    page.picture("shares", what, draw, width=9)
    page.text("Bars: simulated. Marks: published.")


def ours(page: Page, outcomes: Outcomes) -> None:
    def row(name: str, shares_and_gains: list[tuple[float, float]]) -> list[str]:
        share, gain = np.mean(shares_and_gains, axis=0)
        return [name, percent(share), f"{gain:.2f}x"]

    def simulated(label: str) -> list[tuple[float, float]]:
        pairs = [
            (next(r for r in results if r.label == label).throughput, results)
            for _, results in outcomes
        ]
        return [(t / results[-1].throughput, t / results[0].throughput) for t, results in pairs]

    paper = [(s.share("quota"), s.throughput["quota"] / s.throughput["none"]) for s, _ in outcomes]
    rows = [
        row("published, two slots", paper),
        row("`quota` simulated, two slots", simulated("quota")),
        row("**`ultraep` simulated, one slot, tolerance 0.01**", simulated("ultraep")),
    ]
    page.text("### Mean over the seven settings")
    page.table(["", "share of forced balance", "over none"], rows)


def errors(page: Page, outcomes: Outcomes) -> None:
    """Errors of the ratios, and the implications of the published ones."""
    page.text("## Accuracy")
    counts: dict[str, list[float]] = {"calibrate": [], "hold back": []}
    wrong = []
    for setting, results in outcomes:
        shares = share_of_ideal(results)
        known = [result for result in results[:-1] if result.policy in setting.throughput]
        counts[setting.use] += [100 * abs(shares[r.label] - setting.share(r.policy)) for r in known]
        wrong += swapped(setting, known)
    rows = []
    for use, off in counts.items():
        within = sum(error <= WITHIN for error in off)
        rows.append([use, f"{len(off)}", f"{within}", f"{np.mean(off):.1f}", f"{max(off):.1f}"])
    head = f"settings; ratios; within {WITHIN:g} points; mean error, points; largest"
    page.table(head.split("; "), rows)
    if wrong:
        page.text("Pairs of policies whose order differs from the published one:")
        page.text(*(f"- {pair}" for pair in wrong))
    implied(page, outcomes)


def swapped(setting: Setting, known: list[Result]) -> list[str]:
    """Pairs whose order differs from the published one."""
    pairs = []
    for first, second in combinations(known, 2):
        one, two = (setting.throughput[result.policy] for result in (first, second))
        if (one - two) * (first.throughput - second.throughput) < 0:
            pairs.append(
                f"{setting.title}: `{first.policy}` and `{second.policy}` "
                f"(published {one:g} and {two:g})"
            )
    return pairs


def implied(page: Page, outcomes: Outcomes) -> None:
    """The share of the time that grows with the busiest rank, if time is linear in it."""

    def part(gain: float, imbalance: float) -> float:
        return (gain - 1) / (imbalance - 1)

    rows = []
    for setting, results in outcomes:
        none, ideal = results[0], results[-1]
        pairs = [
            part(1 / setting.share(policy), setting.imbalance[policy])
            for policy in ("none", "eplb")
        ]
        simulated = part(ideal.throughput / none.throughput, none.imbalance)
        rows.append([setting.title, *(f"{value:.2f}" for value in pairs), f"{simulated:.2f}"])
    page.text(
        "Implied by the published figures: suppose that one part of the step time is constant and the other "
        "grows with the busiest rank. Then `none` and `EPLB` each give the size of the second part, which "
        "should be equal for one model on one task. Where two published columns, or two models of nearly "
        "the same shape, differ by a factor, no model of this kind can match both."
    )
    page.table(["setting", "by none, published", "by EPLB, published", "by none, simulated"], rows)


# -- measurements --------------------------------------------------------------------------------


def measured(page: Page, *, small: bool) -> None:
    """Predictions next to our own measurements."""
    page.text(
        "## Predicted and measured",
        "",
        "Speed of one layer, forward and backward, as a share of its speed with tile-perfect routing: "
        "eight ranks on partitions of one H200. Nothing was calibrated on these runs. A dash means "
        "that the measured plan was a different one. `python benchmarks/bench_sim.py`.",
    )
    for title, lines in bench_sim.card_tables(small):
        page.text(f"### {title.split(':')[0]}")
        rows = []
        for line in lines:
            numbers = (
                "-" if value is None else f"{value:{metric.form}}"
                for metric, value in line.values.items()
            )
            rows.append([str(line.case["load"]), f"`{line.case['policy']}`", *numbers])
        page.table(["load", "policy", "predicted", "measured", "points"], rows)


def write(folder: Path, effort: Effort) -> None:
    """Write all sections into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(folder)
    known = versions()
    page.text(
        "# The published evaluation, simulated",
        "",
        "Written by `make paper` "
        f"(ultraep {known['ultraep']}, NumPy {known['numpy']}); "
        "[how the simulator works and how accurate it is](../simulator.md). "
        "All simulated figures are predictions for a GB200 NVL72. Measurements are in the section "
        "*Predicted and measured*.",
    )
    published(page, effort)
    measured(page, small=effort.layers is not None)
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
