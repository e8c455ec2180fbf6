"""Launch kernels with little work on the host.

Where kernels last microseconds, host time dominates. Triton inspects every argument of every launch
to find the compiled kernel. `quick` looks up the compiled kernel by what kernels are specialised
for: dtypes, whether addresses and integers are divisible by 16, and whether integers are 1. `Bound`
inspects only the arguments that change. Both pass addresses in place of tensors, which Triton would
look up one by one.

    quick(kernel)[grid](*arguments, **constants)            instead of kernel[grid](...)

    launch = Bound(kernel, buffer, OPEN, 64, **constants)   once
    launch(grid, rows)                                      rows in place of OPEN
    bound(key, make)(grid, rows)                            make() returns the Bound of a new key
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from triton import knobs
from triton.runtime import JITFunction, driver

from ultraep.backends.triton.kernels.tiles import Matrix
from ultraep.errors import ConfigError

ALIGNED = 15  # bits of an address or integer for which kernels are specialised
WIDE = 1 << 31  # integers from here on have 64 bits
OPEN: Any = object()  # an argument that every call of a `Bound` passes
_known: dict[int, Quick] = {}


def cdiv(number: int, size: int) -> int:
    """Divide, rounding up; Triton's own function is ten times slower on the host."""
    return -(-number // size)


def power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def matrix(tensor: torch.Tensor | None) -> Matrix:
    """Return a matrix as the argument of a kernel."""
    if tensor is None:
        return Matrix(None, None, None)
    return Matrix(tensor, tensor.stride(0), tensor.shape[1])


def open_matrix(tensor: torch.Tensor | None) -> Matrix:
    """Return a matrix as the argument of a `Bound`, without its memory."""
    return matrix(tensor) if tensor is None else matrix(tensor)._replace(ptr=OPEN)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; the interpreter uses two."""
    if device.type != "cuda":
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def require_resident(programs: int, warps: int, device: torch.device) -> None:
    """Raise if a GPU cannot run that many programs at once: kernels that poll would hang.

    Counts the threads of a multiprocessor, not registers or shared memory, so that every refused
    launch would certainly hang.
    """
    if device.type != "cuda":
        return
    properties = torch.cuda.get_device_properties(device)
    threads = warps * getattr(properties, "warp_size", 32)
    per_multiprocessor = properties.max_threads_per_multi_processor // threads
    most = properties.multi_processor_count * per_multiprocessor
    if programs > most:
        raise ConfigError(
            f"{programs} programs of {warps} warps wait for each other, but {properties.name} runs "
            f"{most} of them at once; put fewer ranks on this device or use fewer programs"
        )


def quick(kernel: Any) -> Any:
    """Return the kernel with quick launches; an interpreted kernel is returned as it is."""
    known = _known.get(id(kernel))
    if known is None:
        if not isinstance(kernel, JITFunction):
            return kernel
        known = _known[id(kernel)] = Quick(kernel)
    return known


class Quick:
    """A kernel and its compiled variants, by their specialisation."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], tuple[_Launch, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        first = arguments[0][0] if isinstance(arguments[0], tuple) else arguments[0]
        device = first.get_device()
        parts = [device, *constants.values()]
        addressed = _specialise(arguments, parts)
        key = tuple(parts)
        known = self._compiled.get(key)
        if known is None or _watched(self._kernel):
            compiled = self._kernel[grid](*arguments, **constants)
            if compiled is not None:
                rest = self._kernel.arg_names[len(arguments) :]
                self._compiled[key] = _Launch(compiled, device), [constants[name] for name in rest]
            return
        launch, rest = known
        launch(grid, (*addressed, *rest))


class Bound:
    """A kernel with fixed arguments; a call passes those that are `OPEN`, in their order.

    Parts of a named tuple may be open. Open integers must not be specialised (`do_not_specialize`).
    """

    def __init__(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        self._kernel, self._arguments, self._constants = kernel, arguments, constants
        self._open = [*_open_places(arguments)]
        self._compiled: dict[tuple[Any, ...], _Launch] = {}
        self._addressed: list[Any] = []  # from the first launch on

    def __call__(self, grid: tuple[int, ...], *values: Any) -> None:
        key: list[Any] = []
        addressed: list[Any] = []
        for value in values:
            if value is None or type(value) is int:
                key += (value is None,)
                addressed += (value,)
            else:
                address = value.data_ptr()
                key += value.dtype, address & ALIGNED
                addressed += (address,)
        launch = self._compiled.get(tuple(key))
        if launch is None or _watched(self._kernel):
            self._through_triton(grid, values, tuple(key))
            return
        launch(grid, self._filled(self._addressed, addressed))

    def _filled(self, arguments: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the arguments with the values in place of `OPEN`."""
        filled = [*arguments]
        for (index, part), value in zip(self._open, values, strict=True):
            if part is None:
                filled[index] = value
            else:
                group = filled[index]
                filled[index] = (*group[:part], value, *group[part + 1 :])
        return filled

    def _through_triton(
        self, grid: tuple[int, ...], values: tuple[Any, ...], key: tuple[Any, ...]
    ) -> None:
        """Let Triton launch the kernel: it compiles it first, or interprets it."""
        arguments = self._filled(self._arguments, values)
        for index, part in self._open:
            if part is not None:  # kernels use the names of the parts
                arguments[index] = self._arguments[index]._make(arguments[index])
        compiled = self._kernel[grid](*arguments, **self._constants)
        if compiled is None:  # it was interpreted
            return
        rest = [self._constants[name] for name in self._kernel.arg_names[len(arguments) :]]
        self._addressed = list(_specialise((*self._arguments, *rest), []))
        self._compiled[key] = _Launch(compiled, torch.cuda.current_device())


_bounds: dict[tuple[Any, ...], Bound] = {}


def bound(key: tuple[Any, ...], make: Callable[[], Bound]) -> Bound:
    """Return the launch of a key: the device, and all that the fixed arguments depend on."""
    launch = _bounds.get(key)
    if launch is None:
        launch = _bounds[key] = make()
    return launch


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what the fixed arguments for a matrix depend on."""
    return tensor.shape[1], tensor.stride()


def _open_places(arguments: Sequence[Any]) -> Iterator[tuple[int, int | None]]:
    """Yield the index of each open argument, and that of its part in a tuple."""
    for index, argument in enumerate(arguments):
        if argument is OPEN:
            yield index, None
        elif isinstance(argument, tuple):
            yield from ((index, part) for part, value in enumerate(argument) if value is OPEN)


def _watched(kernel: Any) -> bool:
    """Whether a profiler wants to see the arguments of launches."""
    runtime = knobs.runtime
    hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
    return bool(hooks or kernel.pre_run_hooks)


class _Launch:
    """Launches a compiled kernel on the current stream of a GPU."""

    def __init__(self, compiled: Any, device: int) -> None:
        self._run, self._device, self._stream = compiled.run, device, current_stream_function()
        self._fixed = compiled.function, compiled.packed_metadata, None, None, None

    def __call__(self, grid: tuple[int, ...], arguments: Sequence[Any]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        self._run(x, y, z, self._stream(self._device), *self._fixed, *arguments)


def current_stream_function() -> Callable[[int], int]:
    """Return the function that returns the handle of the current stream of a GPU."""
    function: Callable[[int], int] = driver.active.get_current_stream
    return function


def _specialise(arguments: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    """Append what a kernel may be compiled for; return the arguments with addresses of tensors.

    The parts of a tuple count one by one.
    """
    addressed = []
    for argument in arguments:
        value = argument
        if type(argument) is int:
            parts.append(_integer(argument))
        elif argument is None:
            parts.append(None)
        elif isinstance(argument, torch.Tensor):
            value = argument.data_ptr()
            parts += argument.dtype, value & ALIGNED
        elif isinstance(argument, tuple):
            if argument[0] is None:  # nothing at all
                parts.append(None)
            else:
                value = _specialise(argument, parts)
        else:
            parts.append(argument)
        addressed.append(value)
    return tuple(addressed)


@lru_cache(maxsize=4096)
def _integer(number: int) -> int:
    """Return what a kernel may be compiled for: a 1, a multiple of 16, more than 32 bits."""
    return (number == 1) + 2 * (number & ALIGNED == 0) + 4 * (not -WIDE <= number < WIDE)
