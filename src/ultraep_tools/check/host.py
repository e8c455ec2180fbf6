"""Level 1: one host for itself, without a process group."""

from __future__ import annotations

import platform
import resource
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

import ultraep
from ultraep import BalanceConfig, BalancedMoE, Balancer, Topology
from ultraep.backends import BACKENDS
from ultraep.errors import BackendUnavailable
from ultraep.runtime.device_planner import DevicePlanner
from ultraep.runtime.hosts import SHARED, this_gpu_host
from ultraep.supported import MEGATRON, SGLANG, TORCHTITAN, TRANSFORMERS, VLLM
from ultraep_tools.check.report import Finding, one_line
from ultraep_tools.machine import version_of
from ultraep_tools.report.words import counted

GB = 1e9
LEAST_SHARED = 1 << 30  # bytes of /dev/shm
FRAMEWORKS = (TRANSFORMERS, TORCHTITAN, MEGATRON, VLLM, SGLANG)
SMI_SECONDS = 20
SMI_FIELDS = (
    *("uuid", "driver_version", "memory.total", "memory.used", "clocks.sm", "clocks.max.sm"),
    *("temperature.gpu", "ecc.errors.uncorrected.volatile.total"),
    *("clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.sw_thermal_slowdown"),
)


def check_host(shown: Callable[[Finding], object], *, kernels_too: bool = True) -> list[Finding]:
    """Run all parts; `shown` gets each finding as soon as it is there."""
    findings = []
    for part in (versions, gpus, memory, kernels, frameworks):
        if part is kernels and not kernels_too:
            continue
        begin = time.perf_counter()
        findings.append(part())
        findings[-1].seconds = time.perf_counter() - begin
        shown(findings[-1])
    return findings


def versions() -> Finding:
    """Return the versions of Python, torch and what plans and kernels need."""
    has_nccl = torch.distributed.is_nccl_available()
    facts: dict[str, Any] = {
        "ultraep": ultraep.__version__,
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "triton", "numba", "numpy")},
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "platform": platform.platform(),
    }
    shown = [f"{name} {version}" for name, version in list(facts.items())[:-1] if version]
    return Finding("versions", ", ".join(shown), facts=facts)


def gpus() -> Finding:
    """Look at the GPUs: memory, clocks, errors, and which can map each other's memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return Finding("GPUs", "no GPU")
    states, finding = gpu_states(), Finding("GPUs")
    names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    finding.summary = f"{counted(count, 'GPU')} ({', '.join(names)})"
    if states:
        finding.summary += f", driver {next(iter(states.values()))['driver_version']}"
    else:
        finding.notes.append("nvidia-smi reports no clocks, errors or temperatures")
    for index, state in states.items():
        _add_state(finding, index, state)
    pairs = [
        f"{first} and {second}"
        for first, second in combinations(range(count), 2)
        if not torch.cuda.can_device_access_peer(first, second)
    ]
    if pairs:
        finding.notes.append(
            f"{counted(len(pairs), 'pair')} of GPUs cannot map each other's memory, first "
            f"{pairs[0]}: their ranks exchange messages"
        )
    host = this_gpu_host()
    if host.obstacle:
        finding.notes.append(f"the NVLink fabric cannot join hosts: {host.obstacle}")
    finding.facts = {"names": names, "states": states, "fabric": host.fabric or None}
    return finding


def _add_state(finding: Finding, index: int, state: dict[str, str]) -> None:
    """Add what the driver reports of one GPU."""
    name, numbers = f"GPU {index}", dict[str, float]()
    for field, text in state.items():
        with suppress(ValueError):  # "[N/A]"
            numbers[field] = float(text)
    if numbers.get("ecc.errors.uncorrected.volatile.total", 0) > 0:
        finding.problems.append(f"{name} has uncorrected memory errors: reset or replace it")
    if "Active" in state.values():
        finding.warnings.append(
            f"{name} is throttled: {state['clocks.sm']} of {state['clocks.max.sm']} MHz at "
            f"{state['temperature.gpu']} C"
        )
    if numbers.get("memory.used", 0) > 0.1 * numbers.get("memory.total", 0):
        finding.notes.append(f"{name}: other programs use {state['memory.used']} MB")


def gpu_states() -> dict[int, dict[str, str]]:
    """Return what the driver reports of the GPUs that torch uses; nothing without its command."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    states = {row[0]: dict(zip(SMI_FIELDS, row, strict=False)) for row in rows}
    visible = [f"GPU-{uuid_of(index)}" for index in range(torch.cuda.device_count())]
    return {index: states[uuid] for index, uuid in enumerate(visible) if uuid in states}


def uuid_of(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def memory() -> Finding:
    """Look at shared and locked memory."""
    free = shutil.disk_usage(SHARED).free if SHARED.exists() else 0
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = locked == resource.RLIM_INFINITY
    lockable = "unlimited" if unlimited else f"{locked / GB:.2f} GB"
    finding = Finding("memory", f"{SHARED} {free / GB:.1f} GB free, locked memory {lockable}")
    finding.facts = {"shared_free": free, "locked": None if unlimited else locked}
    if free < LEAST_SHARED:
        finding.notes.append(
            f"{SHARED} has {free / GB:.2f} GB: start the container with --ipc=host or --shm-size=8g"
        )
    if not unlimited and Path("/dev/infiniband").exists():
        finding.notes.append(f"InfiniBand needs `ulimit -l unlimited`, the limit is {lockable}")
    return finding


def kernels() -> Finding:
    """Plan the same loads with every backend, and run one layer, forward and backward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    finding, quotas = Finding("kernels"), {}
    topology = Topology(ranks=8, experts=64, slots=1)
    loads = ultraep.workload.zipf(8, 64, ratio=2.0, top_k=4, tokens=1024)
    config = BalanceConfig(objective="balance")
    for name in (*BACKENDS, "triton") if device.type == "cuda" else BACKENDS:
        begin = time.perf_counter()
        try:
            if name == "triton":
                on_device = torch.from_numpy(loads).to(device)
                plan = DevicePlanner(topology, config, rows=0).plan(on_device).to_host()
            else:
                plan = ultraep.plan(loads, topology, config, backend=name)
        except Exception as error:  # noqa: BLE001  every error is a finding
            finding.problems.append(f"backend {name} does not run: {one_line(error)}")
            continue
        quotas[name] = plan.quotas.tolist()
        finding.facts[name] = time.perf_counter() - begin
    wrong = [name for name, own in quotas.items() if own != quotas.get("reference", own)]
    finding.problems += [f"backend {name} plans other quotas than the reference" for name in wrong]
    try:
        _run_layer(device)
    except Exception as error:  # noqa: BLE001
        finding.problems.append(f"a layer on {device} does not run: {one_line(error)}")
    finding.summary = f"backends {', '.join(quotas)} plan alike, a layer runs on {device}"
    return finding


def _run_layer(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a balancer alone, which balances nothing
        balancer = Balancer("alone", experts=8)
    moe = BalancedMoE.swiglu(64, 128, 8, 2, balancer=balancer, device=device)
    tokens = torch.randn(256, 64, device=device, requires_grad=True)
    moe(tokens).sum().backward()
    balancer.close()
    if tokens.grad is None or not bool(torch.isfinite(tokens.grad).all()):
        raise RuntimeError("its gradients are not finite")


def frameworks() -> Finding:
    """Compare installed frameworks with the versions that were tested."""
    installed = {library: library.installed() for library in FRAMEWORKS}
    finding = Finding("frameworks")
    finding.facts = {library.name: version for library, version in installed.items() if version}
    for library, version in installed.items():
        try:
            if version:
                library.check(finding.notes.append)
        except BackendUnavailable as error:
            finding.notes.append(str(error))
    if version := version_of("deep_ep"):
        finding.facts["deep_ep"] = version
    listed = [f"{name} {version}" for name, version in finding.facts.items()]
    finding.summary = ", ".join(listed) or "none installed"
    return finding
