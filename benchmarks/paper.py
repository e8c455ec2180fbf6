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
from pathlib import Path
from typing import Any

import bench_sim
import numpy as np
from harness import ROOT
from paper_studies import FULL, TOY, Effort, Page, percent, scaling, studies

from ultraep.tools.report.rows import versions
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.published import CONTENDERS, Setting, scenario_of, settings, share_of_ideal
from ultraep.tools.sim.run import Result

NAMES = {"quota": "UltraEP as published (`quota`)", "ultraep": "**`ultraep`, one slot**"}
WITHIN = 5.0  # points
Found = list[tuple[Setting, list[Result]]]


def published(page: Page, effort: Effort) -> None:
    """Every setting: published beside simulated."""
    found = []
    for setting in settings()[: effort.settings]:
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


def picture_of_shares(page: Page, found: Found) -> None:
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


def ours(page: Page, found: Found) -> None:
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


def errors(page: Page, found: Found) -> None:
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


def implied(page: Page, found: Found) -> None:
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
        "models of nearly the same shape, disagree by a factor, no model of this kind can meet both."
    )
    page.table(["setting", "by none, published", "by EPLB, published", "by none, simulated"], rows)


def exposed(page: Page, found: Found) -> None:
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


def measured(page: Page, *, small: bool) -> None:
    """Predictions beside our own measurements."""
    page.text(
        "## Predicted beside measured",
        "",
        "Share of forced balance of one layer, forward and backward: eight ranks on partitions of one "
        "H200, and two processes on two cores. Nothing was calibrated on the H200 runs; on the cores "
        "the one rate comes from forced balance. A dash: what was measured there was another plan. "
        "`python benchmarks/bench_sim.py`.",
    )
    for title, lines in (*bench_sim.card_tables(small), bench_sim.cpu_table()):
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
    measured(page, small=effort.layers is not None)
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
