"""The simulator against processes: predicted and measured speed of a balanced layer.

    python benchmarks/bench_sim.py --json out.json

`bench_ranks_gpu.py` has measured gains, and shares of the speed of even routing, in eight processes
on one H200 with an eighth of its multiprocessors each (`results/ranks_quick_h200_202611.json` and
`ranks_deepseek_h200`). The simulator predicts both for the same loads and plans, on a cluster of
eight such parts. Ranks share the power and the memory of the GPU, so a busy rank is faster while
others wait, by the factors in `results/grouped_h200_202611.json`. The last table has the mean and
the worst error.
"""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
from harness import ROOT, Bench, Line, Metric, main
from load_cases import Shape, draw
from numpy.typing import NDArray

import ultraep
from ultraep import BalanceConfig, Plan, Topology, workload
from ultraep.arrays import IntArray
from ultraep.workload import Load
from ultraep_tools.check.predict import clock_of, replicas_of, stage_seconds
from ultraep_tools.check.size import LayerSize
from ultraep_tools.sim.cluster import load_cluster

FloatArray = NDArray[np.float64]

PARTITIONS = "h200-eight-parts"
MODELS = {  # as `bench_ranks_gpu.py` has named them; the curve of the expert products
    "Qwen3-235B": (Shape(hidden=4096, ffn=1536, experts=128, top_k=8, tokens=0, ranks=8), "qwen3"),
    "DeepSeek": (Shape(hidden=7168, ffn=2048, experts=128, top_k=8, tokens=0, ranks=8), "deepseek"),
    "gpt-oss": (Shape(hidden=2880, ffn=2880, experts=128, top_k=4, tokens=0, ranks=8), "qwen3"),
}
BALANCED = {"default": 1, "2 slots": 2, "3 slots": 3}
MEASUREMENTS = ("ranks_quick_h200", "ranks_deepseek_h200")

PREDICTED = Metric("predicted_gain", "ratio", "predicted", ".3f")
MEASURED = Metric("gain_over_none", "ratio", "measured", ".3f")
SHARE = Metric("predicted_share_of_even", "share", "predicted", ".3f")
MEASURED_SHARE = Metric("share_of_random_even_routing", "share", "measured", ".3f")
OFF = Metric("error", "percent", "% off", "+.1f")
MEAN = Metric("mean_error", "percent", "mean % off", ".1f")
WORST = Metric("worst_error", "percent", "worst % off", ".1f")
COUNT = Metric("cases", "cases", "cases", ".0f")


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a results file."""
    path = ROOT / "benchmarks" / "results" / f"{name}_202611.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def loads_of(name: str, shape: Shape) -> IntArray:
    """[R, E] loads of a case by its name."""
    if name in workload.KINDS:
        return draw(Load(name), shape)
    kind, _, imbalance = name.rpartition(" ")
    return draw(Load(kind, float(imbalance)), shape)


@cache
def speed_by_busy(curve: str, direction: str) -> FloatArray:
    """[0..8] speed of a part by number of busy parts, relative to eight."""
    times = {
        row["case"]["busy"]: row["value"]
        for row in rows_of("grouped_h200")
        if (row["benchmark"], row["metric"]) == ("grouped/partitions", f"{direction}_time_p50")
        and (row["case"]["model"], row["case"]["rows"]) == (curve, 4096)
    }
    busy = sorted(times)
    speed: FloatArray = np.interp(np.arange(9), busy, [times[8] / times[n] for n in busy])
    return speed


def card_seconds(work_R: FloatArray, speed: FloatArray) -> float:
    """Seconds until the last rank is done; `work_R`: seconds per rank if all stayed busy."""
    work = np.diff(np.sort(work_R), prepend=0.0)  # of the ranks that are still busy
    return float((work / speed[len(work) : 0 : -1]).sum())


def predict_on_card(shape: Shape, curve: str, plan: Plan, runtime: str) -> float:
    """Seconds of a layer, forward and backward, on eight parts of a card."""
    layer = LayerSize(*(shape.hidden, shape.ffn, shape.experts, shape.top_k, shape.tokens))
    clock = clock_of(load_cluster(PARTITIONS), layer, plan.topology, runtime)
    replicas = replicas_of(plan)
    seconds = stage_seconds(clock, replicas, "experts", "experts back")
    for direction in ("forward", "backward"):
        work_SR = clock.experts_by_rank(replicas, backward=direction == "backward")
        seconds += card_seconds(work_SR[0], speed_by_busy(curve, direction))
    return seconds


def predicted_seconds(case: dict[str, Any], load: str, slots: int) -> float:
    """Seconds with a plan for balance; without slots, of the unbalanced layer."""
    shape, curve = next(value for name, value in MODELS.items() if case["model"].startswith(name))
    shape = Shape(**{**vars(shape), "tokens": case["tokens"]})
    topology = Topology(ranks=shape.ranks, experts=shape.experts, slots=slots)
    policy = "ultraep" if slots else "none"
    plan = ultraep.plan(loads_of(load, shape), topology, BalanceConfig(policy=policy))
    return predict_on_card(shape, curve, plan, policy)


def measured_lines() -> tuple[list[Line], list[Line]]:
    """Gains of all balanced loads, and their shares of the speed of even routing."""
    rows = [row for name in MEASUREMENTS for row in rows_of(name)]
    measured = {(repr(row["case"]), row["metric"]): row["value"] for row in rows}
    gains, shares = [], []
    for case in (row["case"] for row in rows if row["metric"] == MEASURED.name):
        slots, load = BALANCED.get(case["variant"]), case["load"]
        if slots is None or "even" in load:
            continue
        wanted = ((load, 0), (load, slots), ("random even", 0))
        none, balanced, even = (predicted_seconds(case, *which) for which in wanted)
        gain, share = (measured[repr(case), metric.name] for metric in (MEASURED, MEASURED_SHARE))
        off = 100 * (none / balanced / gain - 1)
        about = {key: case[key] for key in ("model", "tokens", "mode", "load", "variant")}
        gains.append(Line(about, {PREDICTED: none / balanced, MEASURED: gain, OFF: off}))
        shares.append(Line(about, {SHARE: even / balanced, MEASURED_SHARE: share}))
    return gains, shares


def against_processes(bench: Bench) -> None:
    """Print gains, shares, and the errors of gains by mode."""
    lines, shares = measured_lines()
    bench.table("Gain of a layer over no balancing, EP8 on one H200", lines)
    bench.table("Share of the speed of random even routing", shares)
    errors = []
    for mode in sorted({str(line.case["mode"]) for line in lines}):
        off = [abs(line.values[OFF] or 0.0) for line in lines if line.case["mode"] == mode]
        values = {COUNT: len(off), MEAN: fmean(off), WORST: max(off)}
        errors.append(Line({"compared": f"simulator and {mode} steps"}, values))
    bench.table("Errors of the gain", errors)


if __name__ == "__main__":
    small = {"toy": True, "quick": False, "full": False}
    main("sim", __doc__, {"ranks": against_processes}, small)
