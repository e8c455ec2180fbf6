"""Operators of Triton's interpreter in fewer steps of Python, for `quick_interpreter`.

Where operands have the same type, or one is a number of Python, nothing has to be found out about
them: numpy computes as the interpreter would, and fits sizes to each other as Triton does. All else
takes the long way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle
from triton.runtime.interpreter import interpreter_semantic as semantic

BOOL, INT32, INT64, FLOAT32, FLOAT64 = map(
    np.dtype, (bool, np.int32, np.int64, np.float32, np.float64)
)
COUNTS = {"int32": INT32, "int64": INT64}
INTEGERS = COUNTS | {"int1": BOOL}
NUMBERS = COUNTS | {"fp32": FLOAT32, "fp64": FLOAT64}
ALL = INTEGERS | NUMBERS
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
EXTREMES = {"minimum": np.minimum, "maximum": np.maximum}
Compute = Callable[[np.ndarray, np.ndarray], np.ndarray]


def install() -> None:
    for name, compute in ARITHMETIC.items():
        replace(f"__{name}__", compute, NUMBERS)
        replace(f"__r{name}__", lambda right, left, compute=compute: compute(left, right), NUMBERS)
    for name, compute in BITWISE.items():
        replace(f"__{name}__", compute, INTEGERS)
    for name, compute in COMPARISONS.items():
        replace(f"__{name}__", compute, NUMBERS, tl.int1)
    for name, compute in EXTREMES.items():
        setattr(semantic, name, extreme(getattr(semantic, name), compute))
    tl.tensor.__add__ = with_pointers(tl.tensor.__add__)
    semantic.where = where(semantic.where)
    semantic.broadcast_impl_value = broadcast(semantic.broadcast_impl_value)


def replace(name: str, compute: Compute, types: dict[str, np.dtype], result: Any = None) -> None:
    """That operator of tensors, for types in which numpy computes as the interpreter does."""
    slow = getattr(tl.tensor, name)

    def quick(self, other):
        kind = types.get(self.dtype.name)
        mine, others = plain(self, self.dtype, kind), plain(other, self.dtype, kind)
        if mine is None or others is None:
            return slow(self, other)
        return made(compute(mine, others), self.handle.dtype, result or self.dtype, self, other)

    quick.long_way = slow
    setattr(tl.tensor, name, quick)


def extreme(slow: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
    def quick(x, y, propagate_nan):
        dtype = common(x, y)
        kind = COUNTS.get(dtype.name)  # others may hold what is no number
        mine, others = plain(x, dtype, kind), plain(y, dtype, kind)
        if mine is None or others is None:
            return slow(x, y, propagate_nan)
        return made(compute(mine, others), dtype, dtype, x, y)

    quick.long_way = slow
    return quick


def with_pointers(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(self, other):
        if not self.dtype.is_ptr() or other.__class__ is not tl.tensor:
            return slow(self, other)
        if other.dtype.name not in COUNTS:
            return slow(self, other)
        size = np.uint64(max(1, self.dtype.element_ty.primitive_bitwidth // 8))
        moved = self.handle.data + size * other.handle.data.astype(np.uint64)
        return made(moved, self.handle.dtype, self.dtype, self, other)

    quick.long_way = getattr(slow, "long_way", slow)
    return quick


def where(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(condition, x, y):
        dtype = common(x, y)
        kind = ALL.get(dtype.name)
        mine, others = plain(x, dtype, kind), plain(y, dtype, kind)
        known = mine is not None and others is not None and condition.handle.data.dtype is BOOL
        if not known or not condition.type.is_block():
            return slow(condition, x, y)
        return made(np.where(condition.handle.data, mine, others), dtype, dtype, condition)

    quick.long_way = slow
    return quick


def broadcast(slow: Callable[..., Any]) -> Callable[..., Any]:
    return lambda lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else slow(lhs, rhs)


def made(data: np.ndarray, held: Any, dtype: Any, *operands: Any) -> Any:
    """A tensor of the interpreter: a block, if an operand is one."""
    for operand in operands:
        if operand.__class__ is tl.tensor and operand.type.is_block():
            dtype = tl.block_type(dtype, data.shape)
            break
    return tl.tensor(TensorHandle(data, held.scalar), dtype)


def common(x: Any, y: Any) -> Any:
    """The type of the one that is a tensor; none, which no table has, if both are numbers."""
    return x.dtype if x.__class__ is tl.tensor else getattr(y, "dtype", tl.void)


def plain(value: Any, dtype: Any, kind: np.dtype | None) -> np.ndarray | None:
    """What numpy computes with: the numbers of a tensor of that type, or one that fits to it."""
    if value.__class__ is tl.tensor:
        data = value.handle.data
        return data if value.dtype.name == dtype.name and data.dtype is kind else None
    if value.__class__ is tl.constexpr:
        value = value.value
    if value.__class__ is int:
        fits = kind is not BOOL and -(2**31) <= value < 2**31
    else:
        fits = value.__class__ is float and kind in (FLOAT32, FLOAT64)
    return constant(value, kind) if fits and kind is not None else None


@functools.lru_cache(typed=True)
def constant(value: float, kind: np.dtype) -> np.ndarray:
    return np.array([value], dtype=kind)
