"""The quick operators of Triton's interpreter return what the original ones return."""

import itertools
import os

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import quick_operators
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # of sixteen bits
]
TYPES = [tl.int1, tl.int32, tl.int64, tl.uint32, tl.bfloat16, tl.float16, tl.float32, tl.float64]
SHAPES = [(), (1,), (4,), (2, 4), (2, 1), (1, 4)]
PLAIN = [3, -7, 2**31, 2**40, 0.5, True, tl.constexpr(5), tl.constexpr(1.5)]
POINTERS = [tl.pointer_type(tl.int32), tl.pointer_type(tl.float64), tl.pointer_type(tl.int1)]
OPERATORS = [
    f"__{prefix}{name}__"
    for prefix, names in (
        ("", (*quick_operators.ARITHMETIC, *quick_operators.BITWISE, *quick_operators.COMPARISONS)),
        ("r", quick_operators.ARITHMETIC),
    )
    for name in names
]


def tensor(dtype, shape, seed=0):
    numbers = np.random.default_rng([seed, *shape]).integers(0, 1 << 33, shape or (1,))
    held = numbers.astype(_get_np_dtype(dtype))
    return tl.tensor(
        TensorHandle(held, dtype), tl.block_type(dtype, list(shape)) if shape else dtype
    )


def tensors(types):
    return [tensor(dtype, shape) for dtype in types for shape in SHAPES]


def outcome(compute, *operands):
    """Return everything that a kernel can observe of a result, or the type of the error."""
    try:
        result = compute(*operands)
    except Exception as error:  # noqa: BLE001  both must fail with the same error
        return type(error)
    data = result.handle.data
    return result.type, result.shape.values, data.dtype, data.shape, data.tobytes()


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compute_the_same(name):
    quick = getattr(tl.tensor, name)
    others = tensors(TYPES) + PLAIN
    for mine, other in itertools.product(tensors(TYPES + POINTERS), others):
        assert outcome(quick, mine, other) == outcome(quick.original, mine, other), (mine, other)


@pytest.mark.parametrize("name", list(quick_operators.EXTREMES))
def test_extremes_are_the_same(name):
    quick = getattr(quick_operators.semantic, name)
    nan = tl.PropagateNan.NONE
    operands = tensors(TYPES) + [number for number in PLAIN if not isinstance(number, tl.constexpr)]
    for x, y in itertools.product(operands, operands):
        assert outcome(quick, x, y, nan) == outcome(quick.original, x, y, nan), (x, y)


def test_where_is_the_same():
    quick = quick_operators.semantic.where
    conditions = [tensor(tl.int1, shape) for shape in SHAPES]
    operands = [*tensors([tl.int1, tl.int32, tl.float16, tl.float32, POINTERS[0]]), 3, 2**40, 0.5]
    for condition, x, y in itertools.product(conditions, operands, operands):
        expected = outcome(quick.original, condition, x, y)
        assert outcome(quick, condition, x, y) == expected, (condition, x, y)
