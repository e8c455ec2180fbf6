r"""What runs at the same time on one GPU: the one place that knows streams.

    forward     main      loads  plan  reroute  dispatch ...... experts  combine
                aside               \ schedule  stream ....../

    backward    main      d combine .......... d experts, weight gradients  last product  d dispatch
                aside    \ stream again ...../                            \ pull, product /

Work aside begins when everything that the main stream was given so far is done, and the main stream
goes on when it is joined. On the CPU everything happens in the order in which it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def capturing(device: torch.device) -> bool:
    """Whether a graph is captured: no rank may wait then, or allocate memory that ranks share."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Overlap:
    """The stream beside the main one, which is whatever stream is current.

    stream: for ranks that may use a part of the device only; None: a new one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._begun = False  # and not joined: a graph must not wait for what it has not
        if device.type == "cuda":
            self._stream = stream or torch.cuda.Stream(device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run the block beside the main stream, after all that this one was given."""
        stream = self._stream
        if stream is None:
            yield
            return
        self._begun = True
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The main stream goes on when what was given aside is done."""
        if self._begun:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._begun = False


class Fetch:
    """A copy of a tensor on its way to the host, as the current stream leaves it."""

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
