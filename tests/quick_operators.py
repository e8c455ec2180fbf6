"""Faster operators for Triton's interpreter, installed by `quick_interpreter`.

If both operands have the same dtype, or one is a Python number, numpy computes what the interpreter
would compute, and broadcasts as Triton does. All other operands go to the original operator.
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
    """Replace an operator of tensors for dtypes in which numpy computes as the interpreter does."""
    slow = getattr(tl.tensor, name)

    def quick(self, other):
        numpy_type = types.get(self.dtype.name)
        left, right = plain(self, self.dtype, numpy_type), plain(other, self.dtype, numpy_type)
        if left is None or right is None:
            return slow(self, other)
        return tensor_of(compute(left, right), self.handle.dtype, result or self.dtype, self, other)

    quick.original = slow
    setattr(tl.tensor, name, quick)


def extreme(slow: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
    def quick(x, y, propagate_nan):
        dtype = common(x, y)
        numpy_type = COUNTS.get(dtype.name)  # floating point may be NaN
        left, right = plain(x, dtype, numpy_type), plain(y, dtype, numpy_type)
        if left is None or right is None:
            return slow(x, y, propagate_nan)
        return tensor_of(compute(left, right), dtype, dtype, x, y)

    quick.original = slow
    return quick


def with_pointers(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(self, other):
        if not self.dtype.is_ptr() or other.__class__ is not tl.tensor:
            return slow(self, other)
        if other.dtype.name not in COUNTS:
            return slow(self, other)
        size = np.uint64(max(1, self.dtype.element_ty.primitive_bitwidth // 8))
        moved = self.handle.data + size * other.handle.data.astype(np.uint64)
        return tensor_of(moved, self.handle.dtype, self.dtype, self, other)

    quick.original = getattr(slow, "original", slow)
    return quick


def where(slow: Callable[..., Any]) -> Callable[..., Any]:
    def quick(condition, x, y):
        dtype = common(x, y)
        numpy_type = ALL.get(dtype.name)
        left, right = plain(x, dtype, numpy_type), plain(y, dtype, numpy_type)
        known = left is not None and right is not None and condition.handle.data.dtype is BOOL
        if not known or not condition.type.is_block():
            return slow(condition, x, y)
        return tensor_of(np.where(condition.handle.data, left, right), dtype, dtype, condition)

    quick.original = slow
    return quick


def broadcast(slow: Callable[..., Any]) -> Callable[..., Any]:
    return lambda lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else slow(lhs, rhs)


def tensor_of(data: np.ndarray, held: Any, dtype: Any, *operands: Any) -> Any:
    """Return a tensor of the interpreter: a block if an operand is a block."""
    for operand in operands:
        if operand.__class__ is tl.tensor and operand.type.is_block():
            dtype = tl.block_type(dtype, data.shape)
            break
    return tl.tensor(TensorHandle(data, held.scalar), dtype)


def common(x: Any, y: Any) -> Any:
    """Return the dtype of the operand that is a tensor; void if both are Python numbers."""
    return x.dtype if x.__class__ is tl.tensor else getattr(y, "dtype", tl.void)


def plain(value: Any, dtype: Any, numpy_type: np.dtype | None) -> np.ndarray | None:
    """Return the array of a tensor of that dtype, or a Python number as an array; else None."""
    if value.__class__ is tl.tensor:
        data = value.handle.data
        return data if value.dtype.name == dtype.name and data.dtype is numpy_type else None
    if value.__class__ is tl.constexpr:
        value = value.value
    if value.__class__ is int:
        fits = numpy_type is not BOOL and -(2**31) <= value < 2**31
    else:
        fits = value.__class__ is float and numpy_type in (FLOAT32, FLOAT64)
    return constant(value, numpy_type) if fits and numpy_type is not None else None


@functools.lru_cache(typed=True)
def constant(value: float, numpy_type: np.dtype) -> np.ndarray:
    return np.array([value], dtype=numpy_type)
