"""The quick operators of Triton's interpreter return what the original ones return."""

import itertools
import os

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here", allow_module_level=True)

import quick_operators
import triton.language as tl
from quick_operators import semantic
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


def test_quick_operators_compute_what_the_original_ones_compute():
    others = tensors(TYPES) + PLAIN
    numbers = [value for value in others if not isinstance(value, tl.constexpr)]
    some = [*tensors([tl.int1, tl.int32, tl.float16, tl.float32, POINTERS[0]]), 3, 2**40, 0.5]
    calls = [
        *((getattr(tl.tensor, n), tensors(TYPES + POINTERS), others) for n in OPERATORS),
        *(
            (getattr(semantic, name), numbers, numbers, [tl.PropagateNan.NONE])
            for name in quick_operators.EXTREMES
        ),
        (semantic.where, [tensor(tl.int1, shape) for shape in SHAPES], some, some),
    ]
    for quick, *operands in calls:
        for values in itertools.product(*operands):
            assert outcome(quick, *values) == outcome(quick.original, *values), values
