"""Every kernel that is launched shows an example in its docstring, and does what it shows there.

An example is a doctest that calls `example`. On a machine with a GPU the kernels are compiled,
elsewhere they run through Triton's interpreter.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_compile import launched

from ultraep.backends.triton import kernels
from ultraep.backends.triton.device import default_device, launching

DEVICE = default_device()
EMPTY = -77  # stands in a room before anything is written


class Memory:
    """A tensor of an example. What is `private` to the kernel is not shown."""

    def __init__(self, tensor: torch.Tensor, private: bool = False) -> None:
        self.tensor, self.private = tensor.to(DEVICE), private
        self.given, self.before = self.tensor, self.tensor.clone()

    def changed(self) -> bool:
        return not torch.equal(self.tensor, self.before)

    def shown(self) -> str:
        return str(self.tensor.tolist()).replace(f"{EMPTY}.0", "_").replace(str(EMPTY), "_")


class Addresses:
    """Pieces of memory that a kernel finds by their addresses, often one of every rank."""

    private = False

    def __init__(self, pieces: list[Memory]) -> None:
        self.pieces = pieces
        self.given = torch.tensor([piece.tensor.data_ptr() for piece in pieces], device=DEVICE)

    def changed(self) -> bool:
        return any(piece.changed() for piece in self.pieces)

    def shown(self) -> str:
        return f"[{', '.join(piece.shown() for piece in self.pieces)}]"


def memory_of(value: object) -> Memory | Addresses:
    """Lists are int32 or float32, by their numbers; bytes are uint8."""
    if isinstance(value, Memory | Addresses):
        return value
    if isinstance(value, bytes):
        return Memory(torch.tensor(list(value), dtype=torch.uint8))
    tensor = torch.tensor(value)
    return Memory(tensor if tensor.is_floating_point() else tensor.to(torch.int32))


def room(*shape: int, dtype: torch.dtype = torch.int32) -> Memory:
    """Memory in which nothing is written yet."""
    return Memory(torch.full(shape, EMPTY, dtype=dtype))


def scratch(*shape: int) -> Memory:
    """Memory that is for the kernel only."""
    return Memory(torch.full(shape, EMPTY, dtype=torch.int32), private=True)


def at(*pieces: object) -> Addresses:
    """The addresses of these pieces."""
    return Addresses([memory_of(piece) for piece in pieces])


def parts(*values: object) -> Memory:
    """One piece with several parts, each of which begins at a multiple of 16 bytes."""
    found = [memory_of(value).given.flatten().view(torch.int32) for value in values]
    return Memory(torch.cat([torch.nn.functional.pad(p, (0, -len(p) % 4)) for p in found]))


# What examples leave out: sizes and tables of the story that `kernels/__init__.py` tells, and how
# products are cut. Strides are those of the tensors.
STORY: dict[str, Any] = {
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
}
STORY |= {"H": 2, "G": 2, "HELD": 2, "ONE_SLOT": True, "R": 2, "C": 2, "STEP": 4, "BUFFERS": 4}
STORY |= {"MEMBERS": 1, "BY_GROUPS": False}
STORY |= dict.fromkeys(("TRANSPOSED", "EVEN_M", "EVEN_N", "EVEN_K", "HALF", "DRAWN"), False)
STORY |= dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), 16) | {"GROUP_M": 8}
PRIVATE = ("attempts", "attempt_loads", "counts", "facts", "scratch", "work", "homes")


def stride_of(name: str, tensors: dict[str, Any]) -> int | None:
    """What a launch gives as the stride of that name: of tensors, of those of slots, of weights."""
    names = {"weights": "homes", "scales": "home_scales"}
    for stem, dim in ((name, 0), (names.get(name, name), 1)):
        for other in (stem, f"of_{stem}", stem.replace("homes", "home_biases"),
                      stem.replace("copies", "copy_biases")):  # fmt: skip
            if other in tensors:
                stride: int = tensors[other].given.stride(dim)
                return stride
    return None


def complete(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """All arguments of an example by the names of the kernel, those that it leaves out too."""
    names = inspect.signature(kernel.fn).parameters
    known = {n: n if n in names or f"{n}_ptr" not in names else f"{n}_ptr" for n in arguments}
    given = {n: STORY[n] for n in names if n in STORY}
    given |= {name: scratch(256) for name in names if name in PRIVATE}
    given |= {known[name]: value for name, value in arguments.items()}
    lists = (list, bytes, Memory, Addresses)
    given = {n: memory_of(v) if isinstance(v, lists) else v for n, v in given.items()}
    tensors = {n.removesuffix("_ptr"): v for n, v in given.items() if hasattr(v, "given")}
    for name in names:
        if name.startswith("stride_") and name not in given:
            given[name] = stride_of(name.removeprefix("stride_"), tensors)
    return {name: given[name] for name in (*names, *given) if name in given}


def example(kernel: Any, programs: int | tuple[int, ...], **arguments: Any) -> None:
    """Launch the kernel with these arguments, and print what it has changed; `_`: not written."""
    given = complete(kernel, arguments)
    memories = {n.removesuffix("_ptr"): v for n, v in given.items() if hasattr(v, "given")}
    grid = programs if isinstance(programs, tuple) else (programs,)
    with launching(DEVICE):
        kernel[grid](**{name: getattr(value, "given", value) for name, value in given.items()})
    changed = {n: memory for n, memory in memories.items() if memory.changed()}
    for name, memory in changed.items():
        if not memory.private:
            print(f"{name} = {memory.shown()}")
    if not changed:
        print("nothing")


RUNNER = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
HELPERS = {f.__name__: f for f in (at, example, parts, room, scratch)}


def examples() -> Iterator[doctest.DocTest]:
    """The docstrings of all kernels, launched or not."""
    for found in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{found.name}")
        for name, value in vars(module).items():
            if hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                names = vars(module) | HELPERS | {"torch": torch}
                text = value.fn.__doc__ or ""
                yield doctest.DocTestParser().get_doctest(text, names, name, module.__file__, None)


EXAMPLES = {test.name: test for test in examples() if test.examples}


def test_every_launched_kernel_has_an_example():
    assert launched() - set(EXAMPLES) == set()


@pytest.mark.parametrize("name", EXAMPLES)
def test_kernels_do_what_their_examples_show(name):
    told: list[str] = []
    RUNNER.run(EXAMPLES[name], out=told.append)
    assert not told, "".join(told)


def test_examples_can_fail():
    """A wrong number is seen, and so is a place that was never written."""
    wrong = EXAMPLES["tile_offsets"].docstring.replace("totals = [3, 1", "totals = [3, _")
    names = EXAMPLES["tile_offsets"].globs
    test = doctest.DocTestParser().get_doctest(wrong, names, "wrong", None, None)
    assert RUNNER.run(test, out=lambda text: None).failed == 1
