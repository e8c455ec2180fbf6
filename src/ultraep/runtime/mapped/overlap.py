r"""What runs at the same time on one GPU: the one place that knows streams.

    forward     main      loads  plan  reroute  dispatch ...... experts  combine
                weights              \ schedule  stream ....../

    backward    main      d combine .......... d experts, weight gradients  last product  d dispatch
                weights  \ stream again ...../                           \             /
                gradients                                                  \ meet  pull /

Work aside begins when everything that the main stream was given so far is done, and the main stream
goes on when it is joined. On the CPU everything happens in the order in which it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ASIDE = ("weights", "gradients")


def capturing(device: torch.device) -> bool:
    """Whether a graph is captured: nobody may wait then, or take memory that ranks share."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class Overlap:
    """The streams beside the main one, which is whatever stream is current.

    streams: one for the weights and one for the gradients, for ranks that may use a part of the
    device only; None: new ones.
    """

    def __init__(
        self, device: torch.device, streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None
    ) -> None:
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._begun: set[str] = set()  # and not joined: a graph must not wait for what it has not
        if device.type == "cuda":
            given = streams or (torch.cuda.Stream(device), torch.cuda.Stream(device))
            self._streams = dict(zip(ASIDE, given, strict=True))

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Run the block beside the main stream, after all that this one was given."""
        stream = self._streams.get(name)
        if stream is None:
            yield
            return
        self._begun.add(name)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def join(self, name: str) -> None:
        """The main stream goes on when what was given aside is done."""
        if name in self._begun:
            stream = self._streams[name]
            torch.cuda.current_stream(stream.device).wait_stream(stream)
            self._begun.remove(name)
