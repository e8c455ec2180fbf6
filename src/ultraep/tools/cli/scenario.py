"""The `Scenario` that a command's options describe, and its description."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ultraep.config import Rates
from ultraep.errors import ConfigError
from ultraep.tools.cli import options as cli
from ultraep.tools.cli.options import IMBALANCE, ScenarioOptions, refuse_options, set_options
from ultraep.tools.report.words import counted
from ultraep.tools.sim.cluster import load_cluster
from ultraep.tools.sim.model import load_model
from ultraep.tools.sim.scenario import Scenario
from ultraep.tools.sim.serving import Serving, load_requests
from ultraep.tools.sim.training import Training
from ultraep.tools.sim.workload import (
    Recorded,
    Skew,
    Workload,
    calibrated_noise,
    fit_skew,
    read_workload,
)

LITTLE_WORK = 1000  # layers times microbatches below which one process is fastest
SYNTHETIC = ("imbalance", "noise", "topic_length", "drift_length")
TRAINING = ("sequence_length", "pipeline", "groups", "microbatches", "steps", "no_recompute")


def make_scenario(options: ScenarioOptions, *, steps: int = 8, **balance: Any) -> Scenario:
    """Return the scenario; raise on wrong options before the loads are fitted.

    steps: default of --steps.   balance: slots, tolerance and interval, if the command has these.
    """
    model = load_model(options.model)
    even = Skew(experts=model.experts, top_k=model.top_k, spread=0, noise=0, seed=options.seed)
    objective = options.objective or ("time" if options.prefill is None else "balance")
    if options.rates is not None and objective == "balance":
        raise ConfigError("--rates have no effect on plans for balance; add --objective time")
    scenario = Scenario(
        cluster=load_cluster(options.cluster),
        model=model,
        workload=even,
        job=_job(options, steps),
        ranks=options.ep,
        domain=options.domain,
        data_plane=options.data_plane,
        objective=objective,
        plan_rates=None if options.rates is None else Rates.from_text(options.rates),
        **balance,
    )
    return replace(scenario, workload=_workload(options, scenario))


def _job(options: ScenarioOptions, steps: int) -> Training | Serving:
    if options.prefill is not None:
        refuse_options(options, TRAINING, "--prefill simulates serving, not training")
        requests = load_requests(options.prefill)
        return Serving(requests=requests, tokens=options.tokens, seed=options.seed)
    sizes = {"steps": steps} | set_options(options, TRAINING)
    sequence = sizes.pop("sequence_length", options.tokens)
    recompute = not sizes.pop("no_recompute", False)
    return Training(tokens=options.tokens, sequence=sequence, recompute=recompute, **sizes)


def _workload(options: ScenarioOptions, scenario: Scenario) -> Workload:
    model = scenario.model
    if options.trace is not None:
        refuse_options(options, SYNTHETIC, "--trace replaces synthetic loads")
        return read_workload(options.trace, experts=model.experts, top_k=model.top_k)
    noise = calibrated_noise(training=scenario.job.trains)
    settings = {"noise": noise, **set_options(options, SYNTHETIC)}
    return fit_skew(
        settings.pop("imbalance", IMBALANCE),
        scenario.topology,
        model.top_k,
        model.expert_layers,
        seed=options.seed,
        **settings,
    )


def describe(scenario: Scenario, *, imbalance: float | None = None, slots: bool = True) -> str:
    """Return three lines: cluster and model, the job, the loads.

    imbalance: of synthetic loads, if it was set.   slots: whether to name the spare slots.
    """
    topology, workload, job = scenario.topology, scenario.workload, scenario.job
    domains = "one fast-link domain"
    if topology.num_domains > 1:
        domains = f"fast-link domains of {topology.domain_size}"
    setup = (
        f"{scenario.model.title} on {scenario.cluster.name}: "
        f"{counted(scenario.devices, 'device')}, EP{scenario.ranks} in {domains}, "
        f"data plane {scenario.plane.name}"
    )
    if slots:
        setup += f", {counted(scenario.slots, 'spare slot')}"
    loads = f"synthetic loads of imbalance {imbalance or IMBALANCE:g} without balancing"
    if isinstance(workload, Recorded):
        windows, layers, _ = workload.loads.shape
        loads = f"recorded loads: {counted(windows, 'microbatch')} of {counted(layers, 'layer')}"
    plans = "by time" if scenario.objective == "time" else "for balance"
    work = _describe_prefill(job) if isinstance(job, Serving) else _describe_training(job)
    return f"{setup}\n{work}\n{loads}; ultraep plans {plans}"


def _describe_prefill(job: Serving) -> str:
    requests = job.requests
    return (
        f"prefill of {requests.name}: prompts of {requests.mean_tokens:,.0f} tokens, chunks of "
        f"{job.tokens:,}, mean time to first token at most {requests.limit_s:g} s"
    )


def _describe_training(job: Training) -> str:
    parts = [
        f"training: {job.tokens:,} tokens per rank and microbatch",
        f"{counted(job.steps, 'step')} of {counted(job.microbatches, 'microbatch')}",
    ]
    if job.pipeline > 1:
        parts.append(f"{job.pipeline} pipeline stages")
    if job.groups > 1:
        parts.append(f"{job.groups} data-parallel groups")
    return ", ".join([*parts, "recompute" if job.recompute else "no recompute"])


def processes_for(scenario: Scenario, processes: int | None) -> int:
    """Return --processes, or one for little work, or one per core."""
    if processes is not None:
        if processes < 1:
            raise ConfigError(f"--processes must be at least 1, got {processes}")
        return processes
    if scenario.model.moe_layers * scenario.microbatches <= LITTLE_WORK:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, cli.MOST_PROCESSES)
