r"""Streams: what runs at the same time on one GPU.

    forward     main      loads  plan  reroute  dispatch ...... experts  combine
                aside               \ schedule  stream ....../

    backward    main      d combine .......... d experts, weight gradients  last product  d dispatch
                aside    \ stream again ...../                            \ pull, product /

Work aside begins when the main stream has finished what was launched before it. The main stream
waits for it at `join`. On the CPU everything runs in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def capturing(device: torch.device) -> bool:
    """Whether a graph is being captured; then no rank may wait or allocate shared memory."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Overlap:
    """A second stream beside the main one, which is the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun = False  # and not joined; a graph must not wait for work outside of it

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Launch the block on the second stream, after everything launched on the main stream."""
        stream = self._stream
        if stream is None:
            yield
            return
        self._begun = True
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """Make the main stream wait for the second one."""
        if self._begun:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._begun = False


class Fetch:
    """An asynchronous copy of a tensor to the host, in the order of the current stream."""

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
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._copy
