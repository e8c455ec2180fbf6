"""One card as several small ones: green contexts, each with its own multiprocessors and streams.

A rank that has more to do than others then really takes longer, as on several cards. Memory, its
bandwidth and the second-level cache stay shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Partition:
    """Some multiprocessors of the card."""

    sms: int
    context: Any
    streams: list[torch.cuda.Stream] = field(default_factory=list)

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A new stream whose kernels run on these multiprocessors only."""
        from cuda.bindings import driver

        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = _ok(driver.cuGreenCtxStreamCreate(self.context, flags, priority))
        stream = torch.cuda.ExternalStream(int(made))
        self.streams.append(stream)
        return stream


def split(count: int, sms: int) -> list[Partition]:
    """The card cut into `count` partitions of `sms` multiprocessors."""
    from cuda.bindings import driver

    torch.cuda.init()
    torch.zeros(1, device="cuda")  # the primary context must be there
    device = _ok(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _ok(driver.cuDeviceGetDevResource(device, kind))
    groups, made, _ = _ok(driver.cuDevSmResourceSplitByCount(count, whole, 0, sms))
    if made < count:
        raise SystemExit(f"the card gives {made} partitions of {sms}, wanted {count}")
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    found = []
    for group in groups[:count]:
        description = _ok(driver.cuDevResourceGenerateDesc([group], 1))
        context = _ok(driver.cuGreenCtxCreate(description, device, flags))
        found.append(Partition(int(group.sm.smCount), context))
    return found


def _ok(result: Any) -> Any:
    """What a call of the driver returned, behind its code."""
    code, *values = result
    if int(code) != 0:
        raise SystemExit(f"CUDA driver: {code!r}")
    return values[0] if len(values) == 1 else values
