"""Launches that cost the host little: where kernels last microseconds, its time is what counts.

Triton looks at every argument of every launch for the kernel that was compiled for its like. Here a
launch is known by no more than what kernels are compiled for, the types of its arguments, whether
addresses and numbers divide by 16 and numbers are one, and what was compiled is launched directly.

    quick(kernel)[grid](*arguments, **constants)            in place of kernel[grid](...)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton.runtime import JITFunction

ALIGNED = 15  # bits of an address or a number that compiled kernels are told of
WIDE = 1 << 31  # numbers from here on have 64 bits
_known: dict[int, Quick] = {}


def cdiv(number: int, size: int) -> int:
    """Pieces of that size in a number; Triton's own is ten times slower on the host."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


def quick(kernel: Any) -> Any:
    """The kernel, launched by way of what was compiled before; the interpreter's as it is."""
    found = _known.get(id(kernel))
    if found is None:
        if not isinstance(kernel, JITFunction):
            return kernel
        found = _known[id(kernel)] = Quick(kernel)
    return found


class Quick:
    """A kernel, and what was compiled of it for every kind of arguments."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kind = (arguments[0].device, *constants.values(), *map(_kind, arguments))
        found = self._compiled.get(kind)
        if found is None:
            self._first(kind, grid, arguments, constants)
            return
        for hook in self._kernel.pre_run_hooks:  # as Triton does
            hook(*arguments, **constants)
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)

    def _first(
        self, kind: Any, grid: tuple[int, ...], arguments: Any, constants: dict[str, Any]
    ) -> None:
        """Compile and launch it as Triton does, and keep what was compiled."""
        compiled = self._kernel[grid](*arguments, **constants)
        if compiled is not None:
            rest = self._kernel.arg_names[len(arguments) :]
            self._compiled[kind] = compiled, tuple(constants[name] for name in rest)


def _kind(argument: Any) -> Any:
    """What a kernel may be compiled for, of one argument."""
    if type(argument) is int:
        return argument == 1, argument & ALIGNED == 0, -WIDE <= argument < WIDE
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() & ALIGNED
    return argument
