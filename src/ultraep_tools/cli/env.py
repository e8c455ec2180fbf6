"""`ultraep env`: versions, devices, backends and policies, to paste into a bug report."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import closing
from itertools import combinations
from typing import TYPE_CHECKING, Any

from rich import box

from ultraep import __version__
from ultraep.backends import BACKENDS, BackendInfo
from ultraep.policies import policy_names
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.terminal import Grid, Terminal
from ultraep_tools.launch.processes import RankPlace
from ultraep_tools.machine import version_of
from ultraep_tools.report.words import counted

if TYPE_CHECKING:
    from ultraep.runtime.hosts import Host  # imports torch

EXAMPLE = "Example: ultraep env --json > env.json, or torchrun ... -m ultraep env on all hosts"
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
PACKAGES = ("numpy", "numba", "torch", "triton")


class EnvOptions(cli.Options):
    as_json: bool = cli.json_option()


@cli.with_options
def command(options: EnvOptions) -> None:
    """Show versions, devices, backends and policies for a bug report.

    Started by torchrun, rank 0 also shows host, device and fast-link domain of every rank.
    """
    place, ranks = RankPlace.of_torchrun(), None
    if place is not None and place.size > 1:
        ranks = _map_of_ranks(place)
        if place.rank > 0:
            return
    torch = _torch()
    facts = {
        "ultraep": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "torch": torch,
        "backends": {info.name: info.available for info in BACKENDS},
        "chosen": {device: _chosen(device) for device in DEVICES},
        "data_planes": {"cpu": "messages: tokens are on the CPU", "cuda": _plane_of_gpus(torch)},
        "policies": policy_names(),
    }
    if ranks is not None:
        facts["ranks"] = ranks
    if options.as_json:
        print(json.dumps(facts, indent=2))
    else:
        Terminal().print(_table(facts))


def _chosen(device: str) -> str:
    """Return the backend for tensors on a device; unlike `select`, log nothing."""
    candidates = (info for info in BACKENDS if info.device in (device, "cpu"))
    return next(info.name for info in candidates if info.available)


def _torch() -> dict[str, Any]:
    """Return torch's devices, or the error of importing torch."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"error": str(error)}
    available = torch.cuda.is_available()
    count = torch.cuda.device_count() if available else 0
    return {
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "available": available,
        "devices": [torch.cuda.get_device_name(device) for device in range(count)],
    }


def _plane_of_gpus(facts: dict[str, Any]) -> str:
    """Return the data plane of a group of all GPUs of this machine, and the reason."""
    if not facts.get("available"):
        return "messages: torch sees no GPU"
    for info in BACKENDS:
        if info.name == "triton" and info.obstacle:
            return f"messages: the backend 'triton' {info.obstacle}"
    import torch

    count = torch.cuda.device_count()
    for first, second in combinations(range(count), 2):
        if not torch.cuda.can_device_access_peer(first, second):
            return f"messages: GPUs {first} and {second} cannot map each other's memory"
    return f"mapped: {counted(count, 'GPU')} can map each other's memory"


def obstacles(hosts: Sequence[Host]) -> list[str]:
    """Return why ranks that could share memory do not."""
    reasons = []
    systems: dict[str, Host] = {}
    for rank, host in enumerate(hosts):
        if host.obstacle:
            reasons.append(f"rank {rank}: its GPU has an NVLink fabric, but {host.obstacle}")
        first = systems.setdefault(host.place[0] if host.place else host.name, host)
        if first.place != host.place:
            reasons.append(
                f"rank {rank}: in another container than {first.name} of the same machine; start "
                "both with the same IPC and PID namespaces"
            )
    return reasons


def _map_of_ranks(place: RankPlace) -> dict[str, Any]:
    """Return where all ranks run and which of them a fast link joins; collective."""
    import torch

    from ultraep.runtime.hosts import fast_links, this_gpu_host
    from ultraep.runtime.torch_dist import TorchDistCommunicator
    from ultraep_tools.launch.group import process_group

    with process_group(place) as group, closing(TorchDistCommunicator(group)) as comm:
        device = "CPU"
        if torch.cuda.is_available():
            torch.cuda.set_device(place.local % torch.cuda.device_count())
            device = f"{torch.cuda.get_device_name()} (cuda:{torch.cuda.current_device()})"
        hosts, devices = zip(*comm.gather_objects((this_gpu_host(), device)), strict=True)
    links = fast_links(hosts)
    return {
        "domains": links.reason,
        "not_joined": obstacles(hosts),
        "map": [
            {"rank": rank, "host": host.name, "device": device, "domain": rank // links.domain}
            for rank, (host, device) in enumerate(zip(hosts, devices, strict=True))
        ],
    }


def _table(facts: dict[str, Any]) -> Grid:
    grid = Grid(box=box.SIMPLE, show_header=False, pad_edge=False)
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name in ("ultraep", "python", "platform", "cpus"):
        grid.add_row(name, str(facts[name]))
    for name, version in facts["packages"].items():
        grid.add_row(name, version or "not installed")
    grid.add_row("devices", _devices(facts["torch"]))
    for info in BACKENDS:
        grid.add_row(f"backend {info.name}", _backend(info, facts["chosen"]))
    for device, plane in facts["data_planes"].items():
        grid.add_row(f"data plane, {DEVICES[device]}", plane)
    grid.add_row("policies", ", ".join(facts["policies"]))
    ranks = facts.get("ranks", {"map": []})
    for rank in ranks["map"]:
        text = f"domain {rank['domain']}: {rank['device']} on {rank['host']}"
        grid.add_row(f"rank {rank['rank']}", text)
    if ranks["map"]:
        grid.add_row("domains", ranks["domains"])
        for reason in ranks["not_joined"]:
            grid.add_row("not joined", reason)
    return grid


def _devices(torch: dict[str, Any]) -> str:
    if "error" in torch:
        return f"unknown, torch cannot be imported: {torch['error']}"
    if not torch["cuda"] and not torch["rocm"]:
        return "CPU only: torch was built without CUDA and ROCm"
    platform = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}"
    return f"{platform}: {', '.join(torch['devices']) or 'no device found'}"


def _backend(info: BackendInfo, chosen: dict[str, str]) -> str:
    if info.obstacle:
        return f"not available: {info.obstacle}"
    devices = [DEVICES[device] for device, name in chosen.items() if name == info.name]
    return f"available, chosen for {' and '.join(devices)} tensors" if devices else "available"
