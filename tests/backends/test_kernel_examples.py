"""Kernels produce what the examples in their docstrings show.

An example is a doctest that calls `example`. With a GPU the kernels are compiled, otherwise
Triton's interpreter runs them.
"""

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ultraep.backends.triton import kernels
from ultraep.backends.triton.device import default_device, launching
from ultraep.backends.triton.kernels.grouped import Tiling
from ultraep.backends.triton.kernels.state import Shape
from ultraep.backends.triton.kernels.tiles import Matrix, SlotTensors

DEVICE = default_device()
EMPTY = -77  # fills memory before anything is written


class Memory:
    """A tensor of an example. `private` tensors belong to the kernel and are not printed."""

    def __init__(self, tensor: torch.Tensor, private: bool = False) -> None:
        self.tensor, self.private = tensor.to(DEVICE), private
        self.given, self.before = self.tensor, self.tensor.clone()

    def changed(self) -> bool:
        return not torch.equal(self.tensor, self.before)

    def shown(self) -> str:
        return str(self.tensor.tolist()).replace(f"{EMPTY}.0", "_").replace(str(EMPTY), "_")


class Addresses:
    """Tensors that a kernel reaches by address, often one per rank."""

    private = False

    def __init__(self, pieces: list[Memory]) -> None:
        self.pieces = pieces
        self.given = torch.tensor([piece.tensor.data_ptr() for piece in pieces], device=DEVICE)

    def changed(self) -> bool:
        return any(piece.changed() for piece in self.pieces)

    def shown(self) -> str:
        return f"[{', '.join(piece.shown() for piece in self.pieces)}]"


def memory_of(value: object) -> Memory | Addresses:
    """Lists are int32 or float32."""
    if isinstance(value, Memory | Addresses):
        return value
    tensor = torch.tensor(value)
    return Memory(tensor if tensor.is_floating_point() else tensor.to(torch.int32))


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Memory:
    return Memory(torch.full(shape, EMPTY, dtype=dtype))


def scratch(*shape: int) -> Memory:
    """Memory for the kernel only."""
    return Memory(torch.full(shape, EMPTY, dtype=torch.int32), private=True)


def shape(**sizes: int) -> Shape:
    """Sizes of the domain of the examples."""
    return Shape(H=2, G=2, HELD=2, ONE_SLOT=True, BUFFERS=4)._replace(**sizes)


def at(*pieces: object) -> Addresses:
    """The addresses of these tensors."""
    return Addresses([memory_of(piece) for piece in pieces])


def parts(*values: object) -> Memory:
    """One tensor of several parts, each at a multiple of 16 bytes."""
    found = [memory_of(value).given.flatten().view(torch.int32) for value in values]
    return Memory(torch.cat([torch.nn.functional.pad(p, (0, -len(p) % 4)) for p in found]))


# Arguments that examples leave out: sizes and tables of the group in `kernels/__init__.py`.
DEFAULTS: dict[str, Any] = {
    "ranks": 2,
    "experts": 4,
    "slots": 1,
    "num_slots": 6,
    "stride": 4,
    "domains": 1,
    "min_tokens": 1,
    "limit": 2,
    "home_of_expert": [0, 0, 1, 1],
    "home_slot_of_expert": [0, 1, 3, 4],
    "first_slot_of_rank": [0, 3, 6],
    "expert_of_place": [0, 2, 1, 3],
    "strides": [1, 1, 1, 1, 3, 3],
    "faults": [0],
    "SHAPE": shape(),
    "TILING": Tiling(False, False, False, 16, 16, 16, GROUP_M=8, HALF=False),
    "H": 2,
    "G": 2,
    "R": 2,
    "C": 2,
    "STEP": 4,
    "GROUP_M": 8,
}
DEFAULTS["TRANSPOSED"] = False
PRIVATE = ("attempts", "attempt_loads", "counts", "outcomes", "scratch", "homes")


class Launch:
    """The arguments of one launch, and the memory that the kernel may change, by name."""

    def __init__(self, kernel: Any, given: dict[str, Any]) -> None:
        self.memories: dict[str, Memory | Addresses] = {}
        self.given = given
        parameters = inspect.signature(kernel.fn).parameters
        self.arguments = {
            name: self.argument(name, parameter.annotation)
            for name, parameter in parameters.items()
        }

    def argument(self, name: str, group: Any) -> Any:
        """One argument, or a group of arguments by the annotation of the parameter."""
        if not (isinstance(group, type) and hasattr(group, "_fields")):
            return self.value(name.removesuffix("_ptr"))
        if group not in (Matrix, SlotTensors):
            return group(*(self.value(field) for field in group._fields))
        value = self.given.get(name)
        if value is None:
            return group(*[None] * len(group._fields))
        if group is SlotTensors:
            fields = (f"{name}.{part}" for part in ("homes", "replicas", "sums", "spans"))
            tensors = [self.tensor(*item) for item in zip(fields, value, strict=False)]
            homes, replicas, sums, spans = [*tensors, None, None][:4]
            return group(
                homes, replicas, sums, spans, homes.stride(0), replicas.stride(0), homes.stride(1)
            )
        tensor = self.tensor(name, value)
        return group(tensor, tensor.stride(0), tensor.shape[1])

    def value(self, name: str) -> Any:
        """The argument of that name: of the example, private to the kernel, or by default."""
        if name in self.given:
            value = self.given[name]
        else:
            value = scratch(256) if name in PRIVATE else DEFAULTS.get(name)
        if isinstance(value, torch.Tensor):
            return value.to(DEVICE)
        lists = (list, Memory, Addresses)
        return self.tensor(name, value) if isinstance(value, lists) else value

    def tensor(self, name: str, value: Any) -> torch.Tensor:
        memory = self.memories[name] = memory_of(value)
        return memory.given


def example(kernel: Any, programs: int | tuple[int, ...], **arguments: Any) -> None:
    """Launch the kernel with these arguments, and print what it has changed; `_`: not written."""
    launch = Launch(kernel, arguments)
    grid = programs if isinstance(programs, tuple) else (programs,)
    with launching(DEVICE):
        kernel[grid](**launch.arguments)
    changed = {name: memory for name, memory in launch.memories.items() if memory.changed()}
    for name, memory in changed.items():
        if not memory.private:
            print(f"{name} = {memory.shown()}")
    if not changed:
        print("nothing")


RUNNER = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
HELPERS = {f.__name__: f for f in (at, example, parts, empty, shape)}


def examples() -> Iterator[doctest.DocTest]:
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        for name, value in vars(module).items():
            if hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                names = vars(module) | HELPERS | {"torch": torch}
                text = value.fn.__doc__ or ""
                yield doctest.DocTestParser().get_doctest(text, names, name, module.__file__, None)


EXAMPLES = {test.name: test for test in examples() if test.examples}


@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels_do_what_their_examples_show(name):
    output: list[str] = []
    RUNNER.run(EXAMPLES[name], out=output.append)
    assert not output, "".join(output)
