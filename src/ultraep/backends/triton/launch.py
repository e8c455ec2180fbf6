"""Launches that cost the host little: where kernels last microseconds, its time is what counts.

Triton looks at every argument of every launch for the kernel that was compiled for its like. Here a
launch is known by no more than what kernels are compiled for, the types of its arguments, whether
addresses and numbers divide by 16 and numbers are one, and what was compiled is launched directly.

    quick(kernel)[grid](*arguments, **constants)            in place of kernel[grid](...)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from triton.runtime import JITFunction

from ultraep.errors import ConfigError

ALIGNED = 15  # bits of an address or a number that compiled kernels are told of
WIDE = 1 << 31  # numbers from here on have 64 bits
_known: dict[int, Quick] = {}


def cdiv(number: int, size: int) -> int:
    """Pieces of that size in a number; Triton's own is ten times slower on the host."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """The least power of two that is not below the number."""
    return 1 << max(0, number - 1).bit_length()


@cache
def require_resident(programs: int, warps: int, device: torch.device) -> None:
    """Raise if a GPU cannot hold so many programs at once, which kernels that wait must be.

    Only the threads of a multiprocessor are counted, not registers and shared memory: what this
    refuses would certainly wait in vain.
    """
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    of_program = warps * getattr(properties, "warp_size", 32)
    most = properties.multi_processor_count * (
        properties.max_threads_per_multi_processor // of_program
    )
    if programs > most:
        raise ConfigError(
            f"{programs} programs of {warps} warps wait for each other, {properties.name} holds "
            f"{most} of them at once: put fewer ranks on this device, or move with fewer programs"
        )


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
