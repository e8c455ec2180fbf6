"""Numbers on their way from a device to the host, without anybody waiting for them."""

from __future__ import annotations

import torch


class Fetch:
    """A copy of a tensor as it is when the current stream has come so far."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._copy = tensor.clone()
            return
        like = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._copy = like.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    def here(self) -> bool:
        """Whether it has come."""
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """The copy; waits for it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
