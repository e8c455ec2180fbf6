"""Where ranks run, and which of them a fast link joins: the domains of a group.

Ranks of one host form a domain. So do the GPUs of several hosts that one NVLink fabric joins, if
their processes may map each other's memory.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

SHARED = Path("/dev/shm")
IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
FABRIC_READY = 3  # state of a GPU that has joined its fabric


class Host(NamedTuple):
    """Where a rank runs; ranks with equal hosts share memory and process ids.

    fabric: identifies the NVLink fabric that maps memory between hosts, or is empty.
    obstacle: why a fabric that is there cannot be used.
    """

    name: str
    place: tuple[str, ...]
    fabric: str = ""
    obstacle: str = ""

    @property
    def domain(self) -> tuple[str, ...]:
        """Equal for ranks that a fast link joins."""
        return (self.fabric,) if self.fabric else (self.name, *self.place)


@cache
def this_host() -> Host:
    """Return the host of this process, without its fabric."""
    place = []
    with suppress(OSError):  # containers of one host may have separate memory and process ids
        place.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        place.append(str(SHARED.stat().st_dev))
        place.append(os.readlink("/proc/self/ns/pid"))
    return Host(socket.gethostname(), tuple(place))


def this_gpu_host() -> Host:
    """Return the host of this process, with the fabric of its current GPU if it has one."""
    host = this_host()
    if not torch.cuda.is_available():
        return host
    fabric = _fabric_of(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    if not fabric:
        return host
    if os.environ.get("NCCL_CUMEM_ENABLE") == "0":
        return host._replace(obstacle="NCCL_CUMEM_ENABLE=0")
    if not any(IMEX_CHANNELS.glob("channel*")):
        return host._replace(obstacle=f"no IMEX channel in {IMEX_CHANNELS}")
    return host._replace(fabric=fabric)


class FastLinks(NamedTuple):
    """Which ranks of a group fast links join.

    groups: number of such groups of ranks.   domain: consecutive ranks of each, or all ranks if
        groups differ in size or order.   reason: in words.   hosts: of the ranks.
    """

    groups: int
    domain: int
    reason: str
    hosts: tuple[str, ...] = ()

    def map(self, domain: int, devices: Sequence[str] = ()) -> str:
        """Return host, device and domain of every rank, with domains of this many ranks."""
        parts = []
        for rank, host in enumerate(self.hosts):
            device = f"{devices[rank]} on " if devices else ""
            parts.append(f"rank {rank}: {device}{host}, domain {rank // domain}")
        return "; ".join(parts)


def fast_links(hosts: Sequence[Host]) -> FastLinks:
    """Find the domains of ranks on these hosts.

    >>> one, two = Host("one", ()), Host("two", ())
    >>> links = fast_links([one, one, two, two])
    >>> links.groups, links.domain, links.reason
    (2, 2, '2 domains of 2 ranks: one; two')
    >>> links.map(2)
    'rank 0: one, domain 0; rank 1: one, domain 0; rank 2: two, domain 1; rank 3: two, domain 1'
    >>> fast_links([one, two, one, two]).reason
    'one domain: the ranks of one are not consecutive'
    """
    blocks = [list(block) for _, block in groupby(hosts, key=lambda host: host.domain)]
    times = Counter(block[0].domain for block in blocks)
    names = [", ".join(sorted({host.name for host in block})) for block in blocks]
    domain = len(hosts)
    if len(blocks) == 1:
        reason = f"one domain: all ranks are on {names[0]}"
    elif len(times) < len(blocks):
        split = next(
            n for n, block in zip(names, blocks, strict=True) if times[block[0].domain] > 1
        )
        reason = f"one domain: the ranks of {split} are not consecutive"
    elif len({len(block) for block in blocks}) > 1:
        listed = ", ".join(f"{len(b)} on {n}" for n, b in zip(names, blocks, strict=True))
        reason = f"one domain: hosts have different numbers of ranks, {listed}"
    else:
        domain = len(blocks[0])
        reason = f"{len(blocks)} domains of {domain} ranks: {'; '.join(names)}"
    return FastLinks(len(times), domain, reason, tuple(host.name for host in hosts))


class _FabricInfo(ctypes.Structure):
    """The fabric of a GPU, as the driver reports it: `nvmlGpuFabricInfo_t`."""

    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def _fabric_of(uuid: str) -> str:
    """Return cluster and clique of a GPU; empty if it is part of no fabric."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    handle, info = ctypes.c_void_p(), _FabricInfo()
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    try:
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            or nvml.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(info))
        )
    except AttributeError:  # an old driver
        return ""
    if failed or info.state != FABRIC_READY or info.status or not any(info.cluster):
        return ""
    return f"{bytes(info.cluster).hex()} clique {info.clique}"
