"""The accuracy and the speed of the simulator.

`card`: a layer on eight partitions of one H200 (`partitions.py`), predicted for the same plans and
loads on a cluster of eight such partitions. Ranks share the power of the GPU, so a busy rank is
faster while others wait, by the factors in `results/grouped_h200_202611.json`. A dash means that
another plan was measured.
`cpu`: a layer in two processes on two cores (results of bench_layer.py). The rate of the cores is
fitted to forced balance; no balancing and ultraep are predicted.
`hosts`: a layer over two simulated hosts of a slow network (results of bench_domains.py). The rate
of the cores is fitted to the hybrid plane without balancing on the faster network.
`speed`: seconds for 1,000 microbatches of 94 layers at EP64, per policy, in two processes.

    python benchmarks/bench_sim.py --json out.json
    python benchmarks/bench_sim.py --only speed
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import bench_domains
import bench_layer
import numpy as np
from harness import ROOT, Bench, Line, Metric, main
from layers import FORCED
from load_cases import Shape, even_ids, loads_of, skewed_ids
from numpy.typing import NDArray
from partitions import LOADS, SHARE_OF_TILE_PERFECT, SIZES, TILE_PERFECT, Size, plan_for
from published import scenario_of, settings

import ultraep
from ultraep import BalanceConfig, Plan, Topology
from ultraep_tools.sim.cluster import Cluster, load_cluster
from ultraep_tools.sim.costs import Costs, measured_rates
from ultraep_tools.sim.layer import LayerClock
from ultraep_tools.sim.model import GroupedAttention, Model
from ultraep_tools.sim.planes import PLANES
from ultraep_tools.sim.planning import Replicas
from ultraep_tools.sim.run import simulate
from ultraep_tools.sim.runtime import Contender, runtime_of
from ultraep_tools.sim.training import Training

FloatArray = NDArray[np.float64]
Table = tuple[str, list[Line]]  # title

PARTITIONS = "h200-eight-parts"
ON_CARD = (("qwen", "qwen3", 0), ("deepseek", "deepseek", 1))  # results, curve, size
SAME = 1e-5  # tolerance: results are stored with seven digits

PREDICTED = Metric("predicted_share", "share", "predicted", ".3f")
MEASURED = Metric("measured_share", "share", "measured", ".3f")
POINTS = Metric("error", "points", "points off", "+.1f")
PREDICTED_MS = Metric("predicted_time", "ms", "predicted ms", ".0f")
MEASURED_MS = Metric("measured_time", "ms", "measured ms", ".0f")
PERCENT = Metric("error", "%", "% off", "+.0f")
SECONDS = Metric("time", "s", "seconds", ".1f")
PER_PLAN = Metric("time_per_layer_and_microbatch", "us", "us per layer and microbatch", ".0f")


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of a results file."""
    path = ROOT / "benchmarks" / "results" / f"{name}_202611.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def clock_of(
    cluster: Cluster, shape: Shape, topology: Topology, policy: str, plane: str = "mapped"
) -> LayerClock:
    """The clock of a model that has only experts, in one layer."""
    sizes: Any = {"experts": shape.experts, "top_k": shape.top_k, "expert_width": shape.ffn}
    sizes |= {"width": shape.hidden, "layers": 1, "dense_layers": 0, "vocabulary": 1}
    attention = GroupedAttention(kind="grouped", heads=1, kv_heads=1, head_width=1)
    model = Model(name="layer", title="", source="benchmarks", attention=attention, **sizes)
    return LayerClock(
        costs=Costs(cluster, model, measured_rates()),
        topology=topology,
        runtime=runtime_of(policy),
        tokens=shape.tokens,
        context=0.0,
        recompute=False,
        plane=PLANES[plane],
    )


def replicas_of(plan: Plan) -> Replicas:
    """A plan of the runtime as the simulator's record."""
    first = np.zeros(plan.num_replicas, dtype=np.int64)
    placed_C4 = np.column_stack([first, plan.replicas[:, :2], plan.quotas])
    return Replicas.of(plan.topology, placed_C4, plan.loads.sum(axis=0)[None])


def stage_seconds(clock: LayerClock, replicas: Replicas, *without: str) -> float:
    """Seconds of a layer, forward and backward, except attention and the named stages."""
    times = clock.times(replicas)
    stages = times.forward | times.backward
    left_out = ("attention", "attention back", *without)
    return sum(float(took[0]) for stage, took in stages.items() if stage not in left_out)


def line(model: str, load: str, policy: str, predicted: float, measured: float | None) -> Line:
    """One line with the predicted and the measured share."""
    case = {"model": model, "load": load, "policy": policy}
    points = None if measured is None else 100 * (predicted - measured)
    return Line(case, {PREDICTED: predicted, MEASURED: measured, POINTS: points})


# -- one GPU -------------------------------------------------------------------------------------


@cache
def speed_by_busy(curve: str, direction: str) -> FloatArray:
    """[0..8] speed of a partition by number of busy partitions, relative to eight."""
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


def predict_on_card(size: Size, curve: str, plan: Plan, policy: str) -> float:
    """Seconds of a layer, forward and backward, on eight partitions of a card."""
    runtime = "none" if policy in ("none", TILE_PERFECT) else "ultraep"
    clock = clock_of(load_cluster(PARTITIONS), size, plan.topology, runtime)
    replicas = replicas_of(plan)
    seconds = stage_seconds(clock, replicas, "experts", "experts back")
    for direction in ("forward", "backward"):
        work_SR = clock.experts_by_rank(replicas, backward=direction == "backward")
        seconds += card_seconds(work_SR[0], speed_by_busy(curve, direction))
    return seconds


def card_tables(small: bool = False) -> Iterator[Table]:
    """Predicted and measured shares of tile-perfect routing."""
    for name, curve, index in ON_CARD:
        size = SIZES[index]
        recorded = rows_of(f"layer_gpu_{name}_h200")
        lines = []
        for load in LOADS[: 1 if small else size.loads]:
            plans = {
                policy: plan_for(size, load, policy)
                for policy in ("none", "eplb", "ultraep", TILE_PERFECT)
            }
            seconds = {
                policy: predict_on_card(size, curve, plan, policy) for policy, plan in plans.items()
            }
            for policy in ("none", "eplb", "ultraep"):
                share = seconds[TILE_PERFECT] / seconds[policy]
                measured = share_on_card(recorded, load.name, policy, plans[policy])
                lines.append(line(curve, load.name, policy, share, measured))
        yield f"{size.model}, EP8 on one H200: share of tile-perfect routing", lines


def share_on_card(
    recorded: list[dict[str, Any]], load: str, policy: str, plan: Plan
) -> float | None:
    """The measured share; None if it was not measured, or with another plan."""
    values = {
        row["metric"]: row["value"]
        for row in recorded
        if (row["case"].get("load"), row["case"].get("policy")) == (load, policy)
    }
    if not values or abs(values["imbalance_after"] - plan.imbalance) >= SAME:
        return None
    return float(values[SHARE_OF_TILE_PERFECT])


# -- two cores -----------------------------------------------------------------------------------


def cpu_table() -> Table:
    """Predict two processes on two cores."""
    size = bench_layer.Size()
    measured = {
        row["case"]["policy"]: row["value"]
        for row in rows_of("layer_cpu")
        if row["metric"] == "step_time_p50" and row["benchmark"] == "layer/gain"
    }
    rate = cpu_seconds(size, cores(1.0), "none", even=True) / (measured[FORCED] * 1e-3)
    forced = cpu_seconds(size, cores(rate), "none", even=True)
    lines = []
    for policy in ("none", "ultraep"):
        share = forced / cpu_seconds(size, cores(rate), policy)
        known = measured[FORCED] / measured[policy]
        lines.append(line("two cores", f"ratio {size.ratio}", policy, share, known))
    return "EP2 on two cores: share of forced balance", lines


def cores(rate: float) -> Cluster:
    """A cluster of two cores with this rate, relative to 1 TFLOP/s."""
    rates: Any = dict.fromkeys(("memory_gb_s", "link_gb_s", "network_gb_s"), 20 * rate)
    rates |= {"devices": 2, "domain": 2, "matmul_tflops": rate}
    return replace(load_cluster(PARTITIONS), name="two-cores", **rates)


def cpu_seconds(
    size: bench_layer.Size, cluster: Cluster, policy: str, *, even: bool = False
) -> float:
    """Predict seconds of a layer, forward and backward."""
    ids = even_ids(size) if even else skewed_ids(size, size.ratio)
    topology = Topology(ranks=size.ranks, experts=size.experts, slots=size.slots)
    plan = ultraep.plan(loads_of(list(ids), size), topology, BalanceConfig(policy=policy))
    return stage_seconds(clock_of(cluster, size, topology, policy), replicas_of(plan))


# -- two simulated hosts -------------------------------------------------------------------------

GOODPUT = 1448 / 1514  # bytes of messages over bytes on an Ethernet link
FITTED = (100, "hybrid, none")


def hosts_table() -> Table:
    """Predict the steps of bench_domains.py on two simulated hosts."""
    measured = {
        (int(row["case"]["network"].split()[0]), row["case"]["variant"]): row["value"]
        for row in rows_of("domains_hosts_cpu")
        if row["metric"] == "step_time_p50"
    }
    low, high = 1e-5, 10.0  # rates of the cores
    for _ in range(40):
        middle = (low * high) ** 0.5
        slow = 1e3 * hosts_seconds(middle, *FITTED) > measured[FITTED]
        low, high = (middle, high) if slow else (low, middle)
    lines = []
    for (mbit, variant), known in measured.items():
        predicted = 1e3 * hosts_seconds(low, mbit, variant)
        values = {
            PREDICTED_MS: predicted,
            MEASURED_MS: known,
            PERCENT: 100 * (predicted / known - 1),
        }
        lines.append(Line({"network": f"{mbit} Mbit/s", "variant": variant}, values))
    return "2 x 2 ranks on two simulated hosts", lines


def hosts_seconds(rate: float, mbit: int, variant: str) -> float:
    """Predict seconds of a layer, forward and backward; the ranks of a host share its network."""
    size, (policy, plane) = bench_domains.HOSTS, bench_domains.VARIANTS[variant]
    network = mbit * GOODPUT / 8e3 / size.domain / measured_rates().network
    cluster = replace(cores(rate), devices=size.ranks, domain=size.domain, network_gb_s=network)
    cluster = replace(cluster, network_shared=True)
    topology = Topology(ranks=size.ranks, experts=size.experts, domain=size.domain)
    loads = np.stack([bench_domains.loads_of_rank(size, rank, 1.5) for rank in range(size.ranks)])
    plan = ultraep.plan(loads, topology, BalanceConfig(policy=policy))
    # Rows of the simulator have two bytes per number, rows of the measured layer four.
    wide = replace(size, hidden=2 * size.hidden)
    return stage_seconds(clock_of(cluster, wide, topology, policy, plane), replicas_of(plan))


# -- speed ---------------------------------------------------------------------------------------


def on_speed(bench: Bench) -> None:
    """Time the simulation of every policy on the same loads."""
    small = bench.scale
    setting = next(setting for setting in settings() if setting.name == "qwen-train")
    job = Training(microbatches=8 if small else 1000, steps=1)
    scenario = replace(scenario_of(setting), job=job)
    if small:
        scenario = replace(scenario, model=replace(scenario.model, layers=2))
    lines = []
    slots_of = ((1, "none"), (1, "eplb"), (1, "lplb"), (2, "quota"), (1, "quota"), (1, "ultraep"))
    for slots, policy in slots_of:
        begin = time.perf_counter()
        simulate(scenario, [Contender(policy, policy, slots=slots)], processes=1 if small else 2)
        took = time.perf_counter() - begin
        plans = scenario.microbatches * scenario.model.moe_layers
        values = {SECONDS: took, PER_PLAN: 1e6 * took / plans}
        lines.append(Line({"policy": policy, "slots": slots}, values))
    about = f"{scenario.microbatches} microbatches, {scenario.model.layers} layers"
    bench.table(f"{about}, EP64, two processes", lines)


def on_card(bench: Bench) -> None:
    for table in card_tables(bench.scale):
        bench.table(*table)


SECTIONS = {
    "card": on_card,
    "cpu": lambda bench: bench.table(*cpu_table()),
    "hosts": lambda bench: bench.table(*hosts_table()),
    "speed": on_speed,
}


if __name__ == "__main__":
    main("sim", __doc__, SECTIONS, {"toy": True, "quick": True, "full": False})  # small or not
