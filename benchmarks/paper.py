"""Write docs/results/paper.md: the published evaluation next to the simulator's predictions.

    make paper                                    # some minutes
    python benchmarks/paper.py --toy --out /tmp/x # few layers, for CI

Tables: the published settings (share of forced balance, throughput, imbalance, published and
simulated), the exposed cost of a layer, predictions next to measurements, and the effect of ranks,
tolerance, tokens and domains. Everything is seeded; the same versions write the same text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from harness import ROOT
from measured import versions
from published import CONTENDERS, Setting, scenario_of, settings, share_of_ideal

from ultraep.files.writing import whole_file, write_text
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.run import Result, simulate
from ultraep_tools.sim.runtime import Contender
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.training import Training

NAMES = {"quota": "published UltraEP (`quota`)", "ultraep": "**`ultraep`, one slot**"}
WITHIN = 5.0  # points
Outcomes = list[tuple[Setting, list[Result]]]
Case = tuple[str, Scenario, Contender]


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    layers: int | None  # of every model; None: all
    steps: int
    points: int  # of a study, at most
    settings: int | None = None  # published ones; None: all

    def cut(self, scenario: Scenario) -> Scenario:
        """The same scenario with fewer layers."""
        if self.layers is None:
            return scenario
        model = replace(scenario.model, layers=self.layers, dense_layers=0)
        return replace(scenario, model=model)

    def run(self, scenario: Scenario, contenders: Sequence[Contender]) -> list[Result]:
        return simulate(self.cut(scenario), contenders)


FULL = Effort(layers=None, steps=2, points=99)
TOY = Effort(layers=4, steps=1, points=1, settings=2)


class Page:
    """Markdown, and pictures beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[str] = []

    def text(self, *lines: str) -> None:
        self.parts.append("\n".join(lines) + "\n")

    def table(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        first, *others = ("| " + " | ".join(line) + " |" for line in (head, *rows))
        self.parts.append("\n".join([first, "|---" * len(head) + "|", *others]) + "\n")

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
    fitted = " and ".join(s.title for s, _ in outcomes if s.use == "calibrate")
    page.text(
        "## The published settings",
        "",
        "Each cell is published / simulated. Throughput is TFLOP/s per device. The constants in "
        f"`calibrated.toml` were fitted to {fitted}; the other settings are held back. The "
        "published serving rates are not simulated: they depend on prompt lengths that are not "
        "public.",
    )
    compared(page, "Share of forced balance, %", outcomes, share_cell)
    picture_of_shares(page, outcomes)
    ours(page, outcomes)
    compared(page, "Throughput", outcomes, throughput_cell)
    compared(page, "Imbalance", outcomes, imbalance_cell)
    errors(page, outcomes)
    exposed(page, outcomes)


def compared(
    page: Page, title: str, outcomes: Outcomes, cell: Callable[[Setting, Result, Result], str]
) -> None:
    """A table with a row per setting and a column per policy but the last one, forced balance."""
    rows = [
        [setting.title, *(cell(setting, result, results[-1]) for result in results[:-1])]
        for setting, results in outcomes
    ]
    page.text(f"### {title}")
    names = [NAMES.get(contender.policy, f"`{contender.policy}`") for contender in CONTENDERS[:-1]]
    page.table(["setting", *names], rows)


def share_cell(setting: Setting, result: Result, ideal: Result) -> str:
    known = result.policy in setting.throughput
    return pair(
        100 * setting.share(result.policy) if known else None,
        100 * result.throughput / ideal.throughput,
        ".1f",
    )


def throughput_cell(setting: Setting, result: Result, _: Result) -> str:
    return pair(setting.throughput.get(result.policy), result.throughput, ".0f")


def imbalance_cell(setting: Setting, result: Result, _: Result) -> str:
    return pair(setting.imbalance.get(result.policy), result.imbalance, ".2f")


def pair(published: float | None, simulated: float, form: str) -> str:
    """A cell: the published figure, if there is one, and the simulated one."""
    return f"{'-' if published is None else format(published, form)}/{simulated:{form}}"


def picture_of_shares(page: Page, outcomes: Outcomes) -> None:
    def draw(axes: Any) -> None:
        colours = {"none": "#b0b0b0", "eplb": "#d8a657", "lplb": "#a9b665", "quota": "#7daea3"}
        for index, (setting, results) in enumerate(outcomes):
            shares = share_of_ideal(results)
            for place, result in enumerate(results[:-1]):
                x = index + (place - 2) * 0.16
                colour = colours.get(result.policy, "#c14a4a")
                label = result.policy if index == 0 else None
                axes.bar(x, 100 * shares[result.policy], 0.15, color=colour, label=label)
                if result.policy in setting.throughput:
                    axes.plot(x, 100 * setting.share(result.policy), "k_", markersize=7)
        axes.set_xticks(range(len(outcomes)), [s.title.replace(" ", "\n", 1) for s, _ in outcomes])
        axes.tick_params(axis="x", labelsize=7)
        axes.set_ylabel("% of forced balance")
        axes.set_ylim(0, 108)
        axes.legend(ncols=5, loc="upper center", fontsize=7, frameon=False)

    what = "Share of forced balance in three settings: bars simulated, marks published"
    page.picture("shares", what, draw, width=9)
    page.text("Bars: simulated. Marks: published.")


def ours(page: Page, outcomes: Outcomes) -> None:
    def row(name: str, shares_and_gains: list[tuple[float, float]]) -> list[str]:
        share, gain = np.mean(shares_and_gains, axis=0)
        return [name, percent(share), f"{gain:.2f}x"]

    def simulated(label: str) -> list[tuple[float, float]]:
        pairs = [(by_policy(results)[label].throughput, results) for _, results in outcomes]
        return [(t / results[-1].throughput, t / results[0].throughput) for t, results in pairs]

    paper = [(s.share("quota"), s.throughput["quota"] / s.throughput["none"]) for s, _ in outcomes]
    rows = [
        row("published, two slots", paper),
        row("`quota` simulated, two slots", simulated("quota")),
        row("**`ultraep` simulated, one slot, tolerance 0.01**", simulated("ultraep")),
    ]
    page.text("### Mean over the three settings")
    page.table(["", "share of forced balance", "over none"], rows)


def errors(page: Page, outcomes: Outcomes) -> None:
    """Errors of the ratios, and pairs of policies in another order."""
    page.text("## Accuracy")
    counts: dict[str, list[float]] = {"calibrate": [], "hold back": []}
    wrong = []
    for setting, results in outcomes:
        shares = share_of_ideal(results)
        known = [result for result in results[:-1] if result.policy in setting.throughput]
        counts[setting.use] += [
            100 * abs(shares[r.policy] - setting.share(r.policy)) for r in known
        ]
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


def exposed(page: Page, outcomes: Outcomes) -> None:
    """The forward cost of balancing per layer."""
    rows = []
    for setting, results in outcomes:
        layers, labels = load_model(setting.model).moe_layers, by_policy(results)
        seconds = [
            sum(labels[label].stages[stage] for stage in ("loads", "plan", "replicate", "reroute"))
            for label in ("quota", "ultraep")
        ]
        rows.append([setting.title, *(f"{total / layers * 1e6:.0f}" for total in seconds)])
    page.text(
        "## Exposed on the critical path",
        "",
        "Microseconds per layer, forward, for loads, plan and weights. Published for EP64: 252 to 300.",
    )
    page.table(["setting", NAMES["quota"], NAMES["ultraep"]], rows)


def by_policy(results: list[Result]) -> dict[str, Result]:
    return {result.policy: result for result in results}


# -- studies ---------------------------------------------------------------------------------------


def study(page: Page, effort: Effort, title: str, text: str, cases: Sequence[Case]) -> None:
    """A table with a row per case."""
    rows = []
    for name, scenario, contender in cases[: effort.points]:
        none, mine, ideal = effort.run(scenario, [CONTENDERS[0], contender, CONTENDERS[-1]])
        rows.append(
            [
                name,
                f"{none.imbalance:.2f}",
                f"{mine.imbalance:.3f}",
                f"{mine.copies:.0f}",
                percent(none.throughput / ideal.throughput),
                percent(mine.throughput / ideal.throughput),
                f"{mine.throughput / none.throughput:.2f}x",
            ]
        )
    page.text(f"### {title}", "", text)
    head = ["", "imbalance before", "after", "replicas", "none, share", "share", "over none"]
    page.table(head, rows)


def studies(page: Page, effort: Effort) -> None:
    """What changes with tokens and domains."""
    page.text(
        "## Sensitivity",
        "",
        "`ultraep` with one slot and tolerance 0.01, beside `none` and `ideal`: Qwen3-235B training, "
        "EP64, GB200 NVL72, 8,192 tokens per rank, imbalance 2.86.",
    )
    ours = Contender("ultraep")
    setting = next(setting for setting in settings() if setting.name == "qwen-train")
    base = scenario_of(replace(setting, groups=1), steps=effort.steps)
    job = base.job
    assert isinstance(job, Training)
    text = "Replicas cost the same with few tokens. With 256 tokens they cost more than they save."
    tokens = [
        (f"{count}", replace(base, job=replace(job, tokens=count, sequence=count)), ours)
        for count in (256, 512, 1024, 2048, 4096, 8192, 16384)
    ]
    study(page, effort, "Tokens per rank", text, tokens)
    text = (
        "Replicas stay in the domain of their home. Rows between domains use the network, 400 Gbit/s "
        "per device, which limits every policy."
    )
    h200 = replace(base, cluster=load_cluster("h200-nvl8"), job=replace(job, pipeline=1))
    racks = [(f"GB200, domains of {n}", replace(base, domain=n), ours) for n in (8, 16, 32, 64)]
    cases = [("H200, domains of 8", h200, ours), *racks]
    study(page, effort, "Domains smaller than the group", text, cases)


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
