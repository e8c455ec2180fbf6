"""Dispatchers of other libraries: DeepEP and HybridEP move the rows to the slots.

    from ultraep.dispatchers.deepep import DeepEP

    balancer = Balancer(group, experts=256, slots=2, dispatcher=DeepEP(buffer))

The modules of this package import no library: you pass the buffer that you created. To write a
dispatcher for a library without autograd, derive from `RawDispatcher` and `LibraryRows`; otherwise
implement `ultraep.dispatch.Dispatcher`, as docs/dispatchers.md shows.

Shapes: T tokens, K experts per token, A arrived rows, L slots of this rank, D model width.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from ultraep.dispatch import Moved, Received, SlotRoutes, combine, send
from ultraep.errors import BackendUnavailable, ConfigError, LoadError
from ultraep.ops.modes import outside_dispatch_modes
from ultraep.ops.products import accumulator
from ultraep.supported import Library


class LibraryRows(ABC):
    """The rows of one microbatch in a library: it keeps the handle; see `RowMover`.

    counts: [L] rows of each slot of this rank, as the library counted them in the first `to_slots`.
    """

    counts: Sequence[int] | torch.Tensor

    @abstractmethod
    def to_slots(self, values_TD: torch.Tensor, scalars_TK: torch.Tensor | None) -> Moved:
        """Return `[A, D]` rows and `[A]` scalars in slot order, without gaps.

        The first call, in forward, has scalars. The calls in backward move gradients to the same
        rows, in the same order.
        """

    @abstractmethod
    def to_tokens(self, rows_AD: torch.Tensor, scalars_A: torch.Tensor | None) -> Moved:
        """Return `[T, D]` the sum of the rows of each token, and `[T, K]` scalars if given."""

    def begin_backward(self) -> None:  # noqa: B027 - most libraries have nothing to do
        """Do nothing: the balancer is notified by its own marks."""


class RawDispatcher(ABC):
    """A dispatcher for a library without autograd: each direction is the gradient of the other.

    It also works under activation checkpointing: backward uses the handle of the recomputed forward
    pass. Gates travel in float32, or in float64 if the tokens are float64.

    dtypes: of the rows that the library moves; (): any.
    width_multiple: the width of rows must be a multiple of it.
    max_tokens: of a rank in a microbatch; None: no limit.
    ordered: whether the rows of a slot have the same order when a microbatch is dispatched again.
        Otherwise the balancer refuses selective checkpointing, which keeps results of some rows.
    """

    dtypes: tuple[torch.dtype, ...] = ()
    width_multiple = 1
    max_tokens: int | None = None
    ordered = False

    def check_slots(self, ranks: int, slots_per_rank: int) -> None:  # noqa: B027
        """Raise if the library cannot serve this number of slots; called by the balancer."""

    @abstractmethod
    def begin(self, routes: SlotRoutes) -> LibraryRows:
        """Return the mover of one microbatch."""

    def dispatch(
        self, tokens_TD: torch.Tensor, gates_TK: torch.Tensor, routes: SlotRoutes
    ) -> Received:
        self._check_rows(tokens_TD)
        if self.max_tokens is not None and len(tokens_TD) > self.max_tokens:
            raise LoadError(
                f"{len(tokens_TD)} tokens in a microbatch, but {type(self).__name__} is for "
                f"{self.max_tokens}: create it and its buffer for more"
            )
        with outside_dispatch_modes():
            library_rows = self.begin(routes)
        gates_TK = gates_TK.to(accumulator(tokens_TD.dtype))
        rows_AD, gates_A, _ = send(tokens_TD, gates_TK, library_rows)
        return Received(rows_AD, gates_A, library_rows.counts, library_rows)

    def combine(self, outputs_AD: torch.Tensor, received: Received) -> torch.Tensor:
        self._check_rows(outputs_AD)
        return combine(outputs_AD, received.state)

    def _check_rows(self, rows: torch.Tensor) -> None:
        name, width = type(self).__name__, rows.shape[1]
        if self.dtypes and rows.dtype not in self.dtypes:
            listed = ", ".join(map(str, self.dtypes))
            raise ConfigError(f"{name} moves rows of {listed}, got {rows.dtype}; cast the tokens")
        if width % self.width_multiple:
            raise ConfigError(
                f"{name} moves rows whose width is a multiple of {self.width_multiple}, got {width}"
                "; leave dispatcher= out"
            )


def check_buffer(buffer: object, library: Library, **arguments: Sequence[str]) -> None:
    """Raise unless a buffer is of a supported version of its library and takes these arguments.

    arguments: names of the arguments that each method must have.
    """
    kind = type(buffer)
    library = replace(library, packages=(kind.__module__.partition(".")[0],))
    library.check()
    for method, names in arguments.items():
        function = getattr(buffer, method, None)
        known = () if function is None else inspect.signature(function).parameters
        missing = [name for name in names if name not in known]
        if function is None or missing:
            raise BackendUnavailable(
                f"{kind.__name__}.{method} of {library.name} {library.installed()} lacks "
                f"{', '.join(missing) or 'everything'}; ultraep knows {library.name} "
                f"{library.supported()}"
            )
