"""What `ultraep plan` is given: loads, a trace, or recorded routing, as microbatches in a row.

Shapes: S microbatches, M of them of each layer, H layers, R ranks, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ultraep.arrays import IntArray
from ultraep.errors import ConfigError, FileError
from ultraep.topology import MAX_EXPERTS
from ultraep.trace.read import holds_trace, read_trace
from ultraep.workload import loads_of_windows, read_loads, read_routing
from ultraep.workload.windows import MOST_NUMBERS, holds_routing

WINDOW = 4096  # tokens of a microbatch cut from recorded routing


@dataclass(frozen=True, eq=False)
class Series:
    """Microbatches layer by layer: all of the first one, then all of the next."""

    loads: IntArray  # [S, R, E]
    layers: int = 1

    def __len__(self) -> int:
        return len(self.loads)

    def place(self, index: int) -> tuple[int, int]:
        """Layer, and microbatch of that layer."""
        return divmod(index, len(self.loads) // self.layers)

    def past(self, index: int, count: int) -> IntArray:
        """The last microbatches of the same layer; the first one sees itself."""
        _, microbatch = self.place(index)
        begin = index - min(microbatch, count)
        return self.loads[begin : max(index, begin + 1)]


def read_series(
    file: Path, *, ranks: int | None = None, experts: int | None = None, window: int | None = None
) -> Series:
    """Read what is there; `experts` and `window` are for recorded routing alone."""
    if holds_routing(file):
        return _routing(file, ranks, experts, WINDOW if window is None else window)
    for option, value in (("--experts", experts), ("--window", window)):
        if value is not None:
            raise ConfigError(f"{option} is for recorded routing, and {file} holds none")
    if not holds_trace(file):
        return Series(read_loads(file))
    trace = read_trace(file)
    if trace.header.homes is not None:
        raise ConfigError(f"{file}: a trace with homes of its own: ultraep trace replay plans it")
    return _by_layer(file, trace.by_layer())


def _routing(file: Path, ranks: int | None, experts: int | None, window: int) -> Series:
    if ranks is None:
        raise ConfigError(
            f"{file}: recorded routing, expert ids of tokens: say how many ranks share the tokens, "
            "as in --ranks 8"
        )
    if ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, got {ranks}")
    texts = read_routing(file)
    found = max(int(ids.max(initial=0)) for ids in texts) + 1
    experts = 1 << (found - 1).bit_length() if experts is None else experts
    if not found <= experts <= MAX_EXPERTS:
        raise ConfigError(
            f"{file}: ids up to {found - 1}, so --experts must lie between {found} and "
            f"{MAX_EXPERTS}, got {experts}"
        )
    if len({ids.shape[1] for ids in texts}) > 1:
        raise FileError(f"{file}: texts of different numbers of layers")
    counts = sum(len(ids) for ids in texts) // max(window, 1) * texts[0].shape[1] * ranks * experts
    if counts > MOST_NUMBERS:
        raise ConfigError(
            f"{file}: {counts:,} counts for {ranks} ranks of {experts} experts, but at most "
            f"{MOST_NUMBERS:,} are planned: use fewer --ranks or a larger --window"
        )
    parts = [loads_of_windows(ids, ranks=ranks, experts=experts, tokens=window) for ids in texts]
    if not sum(map(len, parts)):
        longest = max(map(len, texts))
        raise ConfigError(
            f"{file}: no text has {window} tokens, the longest has {longest}: a smaller --window"
        )
    return _by_layer(file, np.concatenate(parts))


def _by_layer(file: Path, loads_MHRE: IntArray) -> Series:
    if not loads_MHRE.size:
        raise FileError(f"{file}: no microbatch of which all layers were recorded")
    microbatches, layers, ranks, experts = loads_MHRE.shape
    ordered = loads_MHRE.astype(np.int64, copy=False).swapaxes(0, 1)
    return Series(ordered.reshape(layers * microbatches, ranks, experts), layers)
