"""The data plane of messages: any group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

from ultraep.microbatch import Context
from ultraep.runtime.planes import DataPlane, PlaneKind, PlaneRequest


def _connect(_: PlaneRequest) -> Callable[[Context], DataPlane]:
    from ultraep.runtime.messages.plane import MessagesPlane

    return MessagesPlane


PLANE = PlaneKind("messages", _connect)
