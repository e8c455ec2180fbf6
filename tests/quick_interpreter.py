"""Shortcuts through Triton's interpreter: the same results from fewer steps of Python.

`install` is called before any kernel runs; in a process whose kernels are compiled it does nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
from types import SimpleNamespace

import numpy as np


@functools.cache
def install() -> None:
    """Once: a second time would take the short ways for the long ones."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    patch_the_language_once()
    sort_at_once()
    leave_out_what_is_not_looked_at()
    remember_the_types_of_numpy()
    remember_the_types_of_blocks()
    round_as_gpus_do()
    import quick_operators

    quick_operators.install()


def patch_the_language_once() -> None:
    """Keep `triton.language` patched: done for every call, that is half of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def sort_at_once() -> None:
    """Sort by numpy in place of a network that swaps pairs."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def sort(x, dim=None, descending=False):
        assert dim in (None, len(x.shape) - 1), "only the last dimension can be sorted"
        data = np.sort(x.handle.data, axis=-1)
        data = np.ascontiguousarray(data[..., ::-1]) if descending else data
        return tl.tensor(TensorHandle(data, x.handle.dtype), x.type)

    tl.sort = sort


def leave_out_what_is_not_looked_at() -> None:
    """Sums are made twice to find an overflow, which only `debug=True` would report."""
    from triton.runtime.interpreter import interpreter_builder

    assert not interpreter_builder.options.debug
    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, sanitize_overflow=False
    )


def remember_the_types_of_numpy() -> None:
    """A table of all types is built for every look into it."""
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, {}

    def by_name(dtype):
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = by_name


def remember_the_types_of_blocks() -> None:
    """A type, and what tensors read from it, is made once: most tensors have one of a few."""
    import triton.language as tl

    make, known = tl.block_type.__init__, {}

    def new(cls, element_ty, shape):
        space = getattr(element_ty, "address_space", None)
        key = element_ty.name, space, *map(operator.index, shape)
        if key not in known:
            made = object.__new__(cls)
            make(made, element_ty, list(shape))
            made.of_tensors = constants(*made.shape)
            known[key] = made
        return known[key]

    @functools.cache
    def constants(*shape):
        return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])

    of_scalars = constants()

    def tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape = kind.of_tensors if kind.is_block() else of_scalars

    tl.block_type.__new__, tl.block_type.__init__ = new, lambda self, element_ty, shape: None
    tl.tensor.__init__ = tensor


def round_as_gpus_do() -> None:
    """To the nearest: the interpreter cuts the last bits off where numbers become bfloat16."""
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
