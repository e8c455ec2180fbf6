"""The simulator against processes: predicted and measured gains of a layer.

    python benchmarks/bench_sim.py --json out.json

`bench_ranks_gpu.py` has measured the gains in eight processes on one H200 with an eighth of its
multiprocessors each (`results/ranks_quick_h200_202611.json` and `ranks_deepseek_h200`). The
simulator predicts them for the same loads and plans, on a cluster of eight such parts. Ranks share
the power and the memory of the GPU, so a busy rank is faster while others wait, by the factors in
`results/grouped_h200_202611.json`. The last table has the mean and the worst error.
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
MEASURED = Metric("measured_gain", "ratio", "measured", ".3f")
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


def predicted_gain(model: str, tokens: int, load: str, slots: int) -> float:
    """Seconds without balancing over seconds with a plan for balance."""
    shape, curve = next(value for name, value in MODELS.items() if model.startswith(name))
    shape = Shape(**{**vars(shape), "tokens": tokens})
    loads = loads_of(load, shape)
    seconds = []
    for policy, count in (("none", 0), ("ultraep", slots)):
        topology = Topology(ranks=shape.ranks, experts=shape.experts, slots=count)
        plan = ultraep.plan(loads, topology, BalanceConfig(policy=policy))
        seconds.append(predict_on_card(shape, curve, plan, policy))
    return seconds[0] / seconds[1]


def measured_lines() -> list[Line]:
    """Predicted and measured gains."""
    lines = []
    for row in (row for name in MEASUREMENTS for row in rows_of(name)):
        case = row["case"]
        slots, load = BALANCED.get(case.get("variant")), case.get("load", "")
        if row["metric"] != "gain_over_none" or slots is None or "even" in load:
            continue
        gain = predicted_gain(case["model"], case["tokens"], load, slots)
        off = 100 * (gain / row["value"] - 1)
        about = {key: case[key] for key in ("model", "tokens", "mode", "load", "variant")}
        values = {PREDICTED: gain, MEASURED: row["value"], OFF: off}
        lines.append(Line(about, values))
    return lines


def against_processes(bench: Bench) -> None:
    """Print all gains, then the errors by mode."""
    lines = measured_lines()
    bench.table("Gain of a layer over no balancing, EP8 on one H200", lines)
    errors = []
    for mode in sorted({str(line.case["mode"]) for line in lines}):
        off = [abs(line.values[OFF] or 0.0) for line in lines if line.case["mode"] == mode]
        values = {COUNT: len(off), MEAN: fmean(off), WORST: max(off)}
        errors.append(Line({"compared": f"simulator and {mode} steps"}, values))
    bench.table("Errors", errors)


if __name__ == "__main__":
    small = {"toy": True, "quick": False, "full": False}
    main("sim", __doc__, {"ranks": against_processes}, small)
