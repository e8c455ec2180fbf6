"""Checks that interpreted kernels access only the memory of their tensor arguments."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

VERBS = {  # interpreter functions, and the positions of their addresses and mask
    "create_masked_load": (0, 1),
    "create_masked_store": (0, 2),
    "create_atomic_rmw": (1, 3),
    "create_atomic_cas": (0, None),
}


class Watch:
    """Counts memory accesses and records the kernels."""

    def __init__(self, also: Iterable[torch.Tensor]) -> None:
        self.kernels: set[str] = set()
        self.touched = 0
        self.always = [span(tensor) for tensor in also]
        self.spans: list[tuple[int, int]] = []

    def enter(self, kernel: str, arguments: list[object]) -> None:
        self.kernels.add(kernel)
        self.spans = self.always + [span(tensor) for tensor in tensors_in(arguments)]

    def check(self, verb: str, pointers, mask) -> None:
        addresses = np.asarray(pointers.data)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
        addresses = addresses.reshape(-1)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        inside = np.zeros(addresses.shape, dtype=bool)
        for begin, end in self.spans:
            inside |= (addresses >= begin) & (addresses + np.uint64(size) <= end)
        if not inside.all():
            raise IndexError(f"{verb}: {(~inside).sum()} of {inside.size} addresses out of bounds")
        self.touched += addresses.size


def tensors_in(arguments: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a kernel, also those in groups."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_in(argument)


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address and the end of a tensor."""
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


@contextmanager
def watched(also: Iterable[torch.Tensor] = ()) -> Iterator[Watch]:
    """Raise an `InterpreterError` as soon as a kernel accesses other memory.

    also: tensors that kernels may access through addresses in a table.
    """
    watch = Watch(also)

    def launching(launch):
        def launched(self, *args, **kwargs):
            watch.enter(self.fn.__name__, [*args, *kwargs.values()])
            return launch(self, *args, **kwargs)

        return launched

    def checking(name, pointers_at, mask_at):
        verb = getattr(InterpreterBuilder, name)

        def checked(self, *args):
            watch.check(name, args[pointers_at], None if mask_at is None else args[mask_at])
            return verb(self, *args)

        return mock.patch.object(InterpreterBuilder, name, checked)

    patches = [checking(name, *where) for name, where in VERBS.items()]
    patches.append(mock.patch.object(GridExecutor, "__call__", launching(GridExecutor.__call__)))
    for patch in patches:
        patch.start()
    try:
        yield watch
    finally:
        for patch in patches:
            patch.stop()
