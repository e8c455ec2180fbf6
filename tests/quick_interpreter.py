"""Patches that make Triton's interpreter faster, with the same results.

Call `install` before any kernel runs. It does nothing in a process whose kernels are compiled.
"""

import dataclasses
import functools
import math
import operator
import os
from types import SimpleNamespace

import numpy as np


@functools.cache
def install() -> None:
    """Install all patches; cached, because a second call would patch the patches."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    patch_language_once()
    sort_with_numpy()
    skip_overflow_checks()
    cache_numpy_types()
    cache_block_types()
    round_to_nearest()


def patch_language_once() -> None:
    """Keep `triton.language` patched: patching it in every call takes half of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def sort_with_numpy() -> None:
    """Sort with numpy instead of a bitonic network."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def sort(x, dim=None, descending=False):
        assert dim in (None, len(x.shape) - 1), "only the last dimension can be sorted"
        data = np.sort(x.handle.data, axis=-1)
        data = np.ascontiguousarray(data[..., ::-1]) if descending else data
        return tl.tensor(TensorHandle(data, x.handle.dtype), x.type)

    tl.sort = sort


def skip_overflow_checks() -> None:
    """Skip the second computation of sums, whose overflow only `debug=True` would report."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, sanitize_overflow=False
    )


def cache_numpy_types() -> None:
    """Cache the numpy dtypes: the interpreter builds a table of all of them for every lookup."""
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, {}

    def by_name(dtype):
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = by_name


def cache_block_types() -> None:
    """Cache block types and what tensors read from them: most tensors have one of a few."""
    import triton.language as tl

    make, known = tl.block_type.__init__, {}

    def new(cls, element_ty, shape):
        space = getattr(element_ty, "address_space", None)
        key = element_ty.name, space, *map(operator.index, shape)
        if key not in known:
            block = object.__new__(cls)
            make(block, element_ty, list(shape))
            block.of_tensors = constants(*block.shape)
            known[key] = block
        return known[key]

    @functools.cache
    def constants(*shape):
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    of_scalars = constants()

    def tensor(self, handle, type_):
        self.handle, self.type, self.dtype = handle, type_, type_.scalar
        self.numel, self.shape = type_.of_tensors if type_.is_block() else of_scalars

    tl.block_type.__new__, tl.block_type.__init__ = new, lambda self, element_ty, shape: None
    tl.tensor.__init__ = tensor


def round_to_nearest() -> None:
    """Round to the nearest bfloat16; the interpreter truncates."""
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounded(self, source, to):
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, to)
        near = torch.from_numpy(source.data.copy()).to(torch.bfloat16)
        return TensorHandle(near.view(torch.uint16).numpy(), to.scalar)

    InterpreterBuilder.cast_impl = rounded
