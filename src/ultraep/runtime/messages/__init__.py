"""The data plane of messages: any group of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ultraep.runtime.microbatch import Context, PlaneKind, PlaneRequest

if TYPE_CHECKING:
    from ultraep.microbatch import DataPlane


def _connect(_: PlaneRequest) -> Callable[[Context], DataPlane]:
    from ultraep.runtime.messages.plane import MessagesPlane

    return MessagesPlane


PLANE = PlaneKind("messages", _connect)
