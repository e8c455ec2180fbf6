"""The `Scenario` of a command's options, and its description."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from ultraep.config import Rates
from ultraep.errors import ConfigError
from ultraep.tools.cli.options import IMBALANCE, MOST_PROCESSES, ScenarioOptions
from ultraep.tools.cli.terminal import count
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

LITTLE_WORK = 1000  # layers times microbatches for which a second process costs more than it saves
DRAWING = ("imbalance", "noise", "topic_length", "drift_length")
TRAINING = ("sequence_length", "pipeline", "groups", "microbatches", "steps", "no_recompute")


# -- the scenario --------------------------------------------------------------------------------


def make_scenario(options: ScenarioOptions, **balance: Any) -> Scenario:
    """What the options say; what cannot work is refused before loads are fitted.

    balance: slots, tolerance and interval of the scenario, where the command asks for them.
    """
    job, model = _job(options), load_model(options.model)
    even = Skew(experts=model.experts, top_k=model.top_k, spread=0, noise=0, seed=options.seed)
    scenario = Scenario(
        cluster=load_cluster(options.cluster),
        model=model,
        workload=even,
        job=job,
        ranks=options.ep,
        domain=options.domain,
        objective=_objective(options),
        prices=None if options.rates is None else Rates.from_text(options.rates),
        **balance,
    )
    return replace(scenario, workload=_workload(options, scenario))


def _job(options: ScenarioOptions) -> Training | Serving:
    given = _given(options, TRAINING)
    if options.prefill is None:
        recompute = not given.pop("no_recompute", False)
        sequence = given.pop("sequence_length", options.tokens)
        return Training(tokens=options.tokens, sequence=sequence, recompute=recompute, **given)
    _refuse(given, "--prefill serves requests", "training")
    return Serving(requests=load_requests(options.prefill), chunk=options.tokens, seed=options.seed)


def _objective(options: ScenarioOptions) -> str:
    """What is asked for, or what the library does: engines for serving plan for balance."""
    usual = "time" if options.prefill is None else "balance"
    objective = usual if options.objective is None else options.objective
    if options.rates is not None and objective == "balance":
        raise ConfigError("--rates are what plans by time reckon with: --objective time")
    return objective


def _workload(options: ScenarioOptions, scenario: Scenario) -> Workload:
    """Recorded loads, or drawn ones with the imbalance that was asked for."""
    given, model = _given(options, DRAWING), scenario.model
    if options.trace is not None:
        _refuse(given, "--trace brings its own loads", "drawn loads")
        return read_workload(options.trace, experts=model.experts, top_k=model.top_k)
    noise = calibrated_noise(training=scenario.job.trains)
    return fit_skew(
        given.pop("imbalance", IMBALANCE),
        scenario.topology,
        model.top_k,
        range(model.dense_layers, model.layers),
        seed=options.seed,
        **{"noise": noise, **given},
    )


def _given(options: ScenarioOptions, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the named options that were given."""
    values = {name: getattr(options, name) for name in names}
    return {
        name: value for name, value in values.items() if value is not None and value is not False
    }


def _refuse(given: dict[str, Any], why: str, kind: str) -> None:
    """Raise if options of the other kind were given."""
    names = [f"--{name.replace('_', '-')}" for name in given]
    if names:
        have = "has" if len(names) == 1 else "have"
        raise ConfigError(f"{why}: {' and '.join(names)} {have} no meaning there, only for {kind}")


# -- in words ------------------------------------------------------------------------------------


def describe(scenario: Scenario, *, imbalance: float | None = None, slots: bool = True) -> str:
    """Return three lines: cluster and model, the job, the loads.

    imbalance: as asked for, of drawn loads.
    slots: whether to name the spare slots.
    """
    topology, workload = scenario.topology, scenario.workload
    where = (
        f"{scenario.model.title} on {scenario.cluster.name}: "
        f"{count(scenario.devices, 'device')}, EP{scenario.ranks} in "
        + (
            f"fast-link domains of {topology.domain_size}"
            if topology.num_domains > 1
            else "one fast-link domain"
        )
        + (f", {count(scenario.slots, 'spare slot')}" if slots else "")
    )
    loads = f"drawn loads of imbalance {imbalance or IMBALANCE:g} when nothing is balanced"
    if isinstance(workload, Recorded):
        windows, layers, _ = workload.loads.shape
        loads = f"recorded loads: {count(windows, 'microbatch')} of {count(layers, 'layer')}"
    plans = "by time" if scenario.objective == "time" else "for balance"
    return f"{where}\n{_describe_job(scenario.job)}\n{loads}; ultraep plans {plans}"


def _describe_job(job: Training | Serving) -> str:
    if isinstance(job, Serving):
        requests = job.requests
        return (
            f"prefill of {requests.name}: prompts of {requests.mean_tokens:,.0f} tokens, chunks of "
            f"{job.chunk:,}, first token after {requests.limit_s:g} s on average"
        )
    parts = [
        f"training: {job.tokens:,} tokens per rank and microbatch",
        f"{count(job.steps, 'step')} of {count(job.microbatches, 'microbatch')}",
    ]
    if job.pipeline > 1:
        parts.append(f"{job.pipeline} pipeline parts")
    if job.groups > 1:
        parts.append(f"{job.groups} data-parallel groups")
    return ", ".join([*parts, "recompute" if job.recompute else "no recompute"])


def processes_for(scenario: Scenario, asked: int | None) -> int:
    """Return the processes asked for; else one for little work, or the cores."""
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"--processes must be at least 1, got {asked}")
        return asked
    if scenario.model.moe_layers * scenario.microbatches <= LITTLE_WORK:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MOST_PROCESSES)
