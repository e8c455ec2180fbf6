"""The options of `ultraep advise`, the `Scenario` that they describe, and its description."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option, refuse_options, set_options
from ultraep_tools.report.words import counted
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.sim.model import load_model
from ultraep_tools.sim.scenario import Scenario
from ultraep_tools.sim.serving import Serving
from ultraep_tools.sim.training import Training
from ultraep_tools.sim.workload import Recorded, Skew, fit_skew, noise_of, read_workload

CLUSTER, MODEL, RANKS, TOKENS, IMBALANCE = "gb200-nvl72", "qwen3-235b", 64, 8192, 2.0
STEPS = 2
TRAINING = ("pipeline", "groups", "microbatches", "steps", "no_recompute")


def training_option(text: str, shown: str) -> Any:
    return option(f"Training only: {text}", shown)


class AdviseOptions(cli.Options):
    """The cluster, model, job, loads and policies.

    Options of training only or of synthetic loads only default to None, so that a scenario without
    training or with recorded loads can refuse them instead of ignoring them.
    """

    cluster: str = option(
        "Cluster: a preset (--presets lists them), FILE.toml or FILE.toml:NAME.",
        default=CLUSTER,
        metavar="NAME|FILE",
    )
    model: str = option("Model: a preset or a TOML file.", default=MODEL, metavar="NAME|FILE")
    ep: int = option("Ranks in the expert-parallel group.", default=RANKS, metavar="RANKS")
    imbalance: float | None = option(
        "Mean imbalance of synthetic loads: busiest rank over mean rank.", f"{IMBALANCE:g}"
    )
    trace: Path | None = option(
        "Recorded loads instead of synthetic ones: a trace, routing (.npz with arrays *_ids) or "
        "loads (.npy, .npz, .csv). They repeat from the start when they run out.",
        metavar="FILE",
    )
    tokens: int = option(
        "Tokens per rank and microbatch; with --prefill, tokens per chunk.", default=TOKENS
    )
    sequence_length: int | None = option("Tokens per sequence or prompt.", "as --tokens")
    pipeline: int | None = training_option("pipeline stages.", "1")
    groups: int | None = training_option(
        "data-parallel replicas of the expert-parallel group.", "1"
    )
    microbatches: int | None = training_option("microbatches per step and group.", "8")
    steps: int | None = training_option("steps to simulate.", f"{STEPS}")
    no_recompute: bool = cli.switch(
        "Training only: keep all activations for backward.", "--no-recompute"
    )
    prefill: bool = cli.switch("Simulate prefill in chunks instead of training.", "--prefill")
    domain: int | None = option(
        "Ranks joined by the fast link; replicas stay in the domain of their home.",
        "of the cluster",
    )
    policy: str | None = option(
        "More policies to compare; `ultraep env` lists them.",
        "ultraep alone",
        metavar="NAME,...",
    )
    seed: int = option("Random seed.", default=0)
    as_json: bool = cli.json_option()
    list_presets: bool = cli.switch("List clusters and models, and exit.", "--presets")


def make_scenario(options: AdviseOptions) -> Scenario:
    """Return the scenario; raise on wrong options before the loads are fitted."""
    model = load_model(options.model)
    even = Skew(experts=model.experts, top_k=model.top_k, spread=0, noise=0, seed=options.seed)
    scenario = Scenario(
        cluster=load_cluster(options.cluster),
        model=model,
        workload=even,
        job=_job(options),
        ranks=options.ep,
        domain=options.domain,
        objective="time",  # as a balancer plans
    )
    return replace(scenario, workload=_workload(options, scenario))


def _job(options: AdviseOptions) -> Training | Serving:
    length = options.sequence_length
    sequence = options.tokens if length is None else length
    if options.prefill:
        refuse_options(options, TRAINING, "--prefill simulates serving, not training")
        return Serving(tokens=options.tokens, sequence=sequence)
    sizes = {"steps": STEPS} | set_options(options, TRAINING)
    recompute = not sizes.pop("no_recompute", False)
    return Training(tokens=options.tokens, sequence=sequence, recompute=recompute, **sizes)


def _workload(options: AdviseOptions, scenario: Scenario) -> Skew | Recorded:
    model = scenario.model
    if options.trace is not None:
        refuse_options(options, ("imbalance",), "--trace replaces synthetic loads")
        return read_workload(options.trace, experts=model.experts, top_k=model.top_k)
    return fit_skew(
        IMBALANCE if options.imbalance is None else options.imbalance,
        scenario.topology,
        model.top_k,
        model.expert_layers,
        noise=noise_of(training=scenario.job.trains),
        seed=options.seed,
    )


def describe(scenario: Scenario, *, imbalance: float | None = None) -> str:
    """Return three lines: cluster and model, the job, the loads.

    imbalance: of synthetic loads, if it was set.
    """
    topology, workload = scenario.topology, scenario.workload
    domains = "one fast-link domain"
    if topology.num_domains > 1:
        domains = f"fast-link domains of {topology.domain_size}"
    loads = f"synthetic loads of imbalance {imbalance or IMBALANCE:g} without balancing"
    if isinstance(workload, Recorded):
        windows, layers, _ = workload.loads.shape
        loads = f"recorded loads: {counted(windows, 'microbatch')} of {counted(layers, 'layer')}"
    return (
        f"{scenario.model.title} on {scenario.cluster.name}: "
        f"{counted(scenario.devices, 'device')}, EP{scenario.ranks} in {domains}\n"
        f"{_describe_job(scenario.job)}\n{loads}"
    )


def _describe_job(job: Training | Serving) -> str:
    if isinstance(job, Serving):
        return f"prefill: prompts of {job.sequence:,} tokens, chunks of {job.tokens:,} per rank"
    parts = [
        f"training: {job.tokens:,} tokens per rank and microbatch",
        f"{counted(job.steps, 'step')} of {counted(job.microbatches, 'microbatch')}",
    ]
    if job.pipeline > 1:
        parts.append(f"{job.pipeline} pipeline stages")
    if job.groups > 1:
        parts.append(f"{job.groups} data-parallel groups")
    return ", ".join([*parts, "recompute" if job.recompute else "no recompute"])
