"""Transformer Engine without a GPU: its own Python, with the compiled part computed by torch.

`install()` imports the Python of Transformer Engine from `FOLDER` with a stand-in for the compiled
module `transformer_engine_torch`. It implements what GroupedLinear needs, with the documented
arguments: grouped gemms, quantisation (128x128 and 1x128 blocks), and padding of rows.
Everything else raises NotImplementedError when it is called. Triton kernels are interpreted.

    make build/transformer-engine/.ready
"""

from __future__ import annotations

import enum
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

FOLDER = Path(__file__).parents[3] / "build" / "transformer-engine"
BLOCK = 128
EMPTY = torch.empty
FP8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def available() -> bool:
    return (FOLDER / "transformer_engine").is_dir()


def install() -> None:
    """Import Transformer Engine; idempotent. Call it before Megatron-Core is imported."""
    if "transformer_engine" in sys.modules:
        return
    assert "megatron.core" not in sys.modules, "Megatron-Core was imported without it"
    sys.path.insert(0, str(FOLDER))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not load libraries
    os.environ["TRITON_INTERPRET"] = "1"  # its permutations are Triton kernels
    compiled = sys.modules["transformer_engine_torch"] = Compiled("transformer_engine_torch")
    compiled.__dict__.update(ENUMS, **FUNCTIONS)
    name = "transformer_engine.pytorch.onnx_extensions"  # needs packages that are not installed
    sys.modules[name] = Compiled(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common

        transformer_engine.common.load_framework_extension = lambda framework: None
        import transformer_engine.pytorch
    fix_block_sizes()


def fix_block_sizes() -> None:
    """Run the kernels that permute rows with one block size: tuning needs a GPU."""
    import transformer_engine.common.triton.permutation as kernels
    from triton.runtime.autotuner import Autotuner

    for kernel in vars(kernels).values():
        if isinstance(kernel, Autotuner):
            kernel.configs = kernel.configs[:1]


@contextmanager
def on_device(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let Transformer Engine believe that it runs on a GPU."""
    import transformer_engine.pytorch.cpp_extensions.gemm as gemm
    import transformer_engine.pytorch.distributed as distributed
    import transformer_engine.pytorch.module.base as base
    import transformer_engine.pytorch.quantization as quantization

    replacements: list[tuple[Any, str, Any]] = [
        (gemm, "get_sm_count", lambda: 1),
        (gemm, "get_cublas_workspace", lambda *_: [torch.empty(1)]),
        (torch.Tensor, "is_cuda", property(lambda tensor: True)),
        (torch.Tensor, "cuda", lambda tensor: tensor),
        (torch, "empty", empty_on_cpu),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (distributed, "_get_cuda_rng_state", lambda **_: torch.get_rng_state()),
        (distributed, "_set_cuda_rng_state", lambda state, **_: torch.set_rng_state(state)),
        (base, "nvtx_range_push", lambda *_: None),
        (base, "nvtx_range_pop", lambda *_: None),
        (quantization, "get_device_compute_capability", lambda: capability),
        (quantization, "check_recipe_support", lambda recipe: None),
        (quantization, "check_fp8_block_scaling_support", lambda: (True, "")),
        (quantization, "check_fp8_support", lambda: (True, "")),
    ]
    with ExitStack() as undo:
        for module, name, replacement in replacements:
            undo.enter_context(patch.object(module, name, replacement, create=True))
        yield


def empty_on_cpu(*size: Any, **options: Any) -> torch.Tensor:
    """`torch.empty` in backward, where torch suspends the mode of `megatron_on_cpu`."""
    return EMPTY(*size, **options | {"device": "cpu"})


class Compiled(types.ModuleType):
    """A module in which everything that is missing raises when it is called."""

    __all__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(name)


class Missing:
    """A function or an enumeration of the compiled part that nothing here should use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not part of the stand-in")

    def __int__(self) -> int:
        return -1

    def __or__(self, other: Any) -> Missing:
        return self

    __ror__ = __or__

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Missing) and other._name == self._name


DTYPES = "Byte Int32 Float32 Float16 BFloat16 Float8E4M3 Float8E5M2 Float4E2M1"
DType = enum.IntEnum("DType", [f"k{name}" for name in DTYPES.split()], start=0)
BACKENDS = ["NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"]
ENUMS = {
    "DType": DType,
    "NVTE_Fused_Attn_Backend": enum.IntEnum("NVTE_Fused_Attn_Backend", BACKENDS),
}


def fp8_dtype(quantizer: Any) -> torch.dtype:
    return FP8[DType(int(quantizer.dtype)).name]


def quantized(values: torch.Tensor, rows: int, columns: int, quantizer: Any) -> tuple[Any, Any]:
    """Return FP8 data as bytes and the inverse scale of every tile of `rows` x `columns`."""
    dtype, (height, width) = fp8_dtype(quantizer), values.shape
    tall, wide = -(-height // rows), -(-width // columns)
    padded = torch.zeros(tall * rows, wide * columns)
    padded[:height, :width] = values.float()
    tiles = padded.view(tall, rows, wide, columns)
    amax = tiles.abs().amax(dim=(1, 3)).clamp(min=1e-30)
    scale = torch.exp2((torch.finfo(dtype).max / amax).log2().floor())
    data = (tiles * scale[:, None, :, None]).view(padded.shape)[:height, :width].to(dtype)
    return data.view(torch.uint8), 1 / scale


def dequantized(data: torch.Tensor, scale_inv: torch.Tensor, rows: int, columns: int, dtype: Any):
    """Return the values of `quantized`."""
    height, width = data.shape
    scales = scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return data.view(dtype).double() * scales[:height, :width]


def tiles_of(quantizer: Any, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a tile. Columnwise data is transposed."""
    kind = type(quantizer).__name__
    if kind == "Float8BlockQuantizer":
        return (BLOCK, BLOCK) if quantizer.block_scaling_dim == 2 else (1, BLOCK)
    if kind == "Float8CurrentScalingQuantizer":
        return max(1, shape[0]), max(1, shape[1])
    raise NotImplementedError(f"{kind} is not part of the stand-in")


class Data:
    """The bytes of a quantised tensor of two dimensions in one direction, with its scales."""

    def __init__(self, values: torch.Tensor, quantizer: Any, *, columnwise: bool) -> None:
        if columnwise:
            values = values.T.contiguous()
        tiles = tiles_of(quantizer, tuple(values.shape))
        self.data, self.scale_inv = quantized(values, *tiles, quantizer)


def quantize(
    tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Quantise a tensor as its quantizer says, into `output` if there is one."""
    assert noop is None
    assert tensor.is_contiguous()
    values = tensor.detach().reshape(-1, tensor.shape[-1])
    rowwise = Data(values, quantizer, columnwise=False) if quantizer.rowwise_usage else None
    columnwise = Data(values, quantizer, columnwise=True) if quantizer.columnwise_usage else None
    if output is None:
        return stored(tensor, quantizer, rowwise, columnwise)
    for name, data in (("rowwise", rowwise), ("columnwise", columnwise)):
        if data is not None:
            getattr(output, f"_{name}_data").copy_(data.data)
            getattr(output, f"_{name}_scale_inv").copy_(data.scale_inv)
    return output


def stored(tensor: torch.Tensor, quantizer: Any, rowwise: Any, columnwise: Any) -> Any:
    """Return the library's own class for quantised data."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
        Float8BlockwiseQTensorStorage,
    )

    fields = {
        "rowwise_data": rowwise and rowwise.data,
        "rowwise_scale_inv": rowwise and rowwise.scale_inv,
        "columnwise_data": columnwise and columnwise.data,
        "columnwise_scale_inv": columnwise and columnwise.scale_inv,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "is_2D_scaled": quantizer.block_scaling_dim == 2,
    }
    if quantizer.internal:
        return Float8BlockwiseQTensorStorage(**fields, fake_dtype=tensor.dtype)
    return Float8BlockwiseQTensor(shape=tensor.shape, dtype=tensor.dtype, **fields)


def values_of(operand: Any, *, columnwise: bool) -> torch.Tensor:
    """Return the values that a gemm reads, with the contracted dimension last."""
    if type(operand) in (torch.Tensor, torch.nn.Parameter):
        return operand.detach().double().T if columnwise else operand.detach().double()
    side = "columnwise" if columnwise else "rowwise"
    data, scales = (getattr(operand, f"_{side}_{part}") for part in ("data", "scale_inv"))
    assert data is not None, f"a gemm needs {side} data that was not made"
    quantizer = operand._quantizer
    return dequantized(data, scales, *tiles_of(quantizer, data.shape), fp8_dtype(quantizer))


def split_quantize(
    tensor: torch.Tensor,
    split_sections: list[int],
    quantizers: list[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    assert len(split_sections) == len(quantizers)
    assert sum(split_sections) == len(tensor)
    parts = tensor.split(split_sections)
    return [quantize(part.contiguous(), q) for part, q in zip(parts, quantizers, strict=True)]


def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    D: list[torch.Tensor] | None,
    D_type: Any,
    m_splits: list[int],
    bias: list[torch.Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: list[torch.Tensor],
    grad: bool,
    workspace: list[torch.Tensor],
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[torch.Tensor]:
    """Compute all gemms; operands are stored by columns, as cuBLAS reads them."""
    assert len(A) == len(B) == len(m_splits) == len(bias)
    assert D is not None
    layout = (transa, transb, grad)
    outputs = list(D[0].split(m_splits)) if single_output else D
    for index, (a, b, out) in enumerate(zip(A, B, outputs, strict=True)):
        if layout == (True, False, False):  # [m, k] rows by [n, k] weights
            product = values_of(b, columnwise=False) @ values_of(a, columnwise=False).T
            if bias[index].numel():
                product = product + bias[index].detach().double()
        elif layout == (False, False, True):  # [m, n] gradients by [n, k] weights
            product = values_of(b, columnwise=False) @ values_of(a, columnwise=True).T
        elif layout == (False, True, True):  # [m, n] gradients and [m, k] rows
            product = values_of(b, columnwise=True) @ values_of(a, columnwise=True).T
            if bias[index].numel():
                bias[index].copy_(b.double().sum(0))
        else:
            raise NotImplementedError(f"layout {layout} is not part of the stand-in")
        assert out.shape == product.shape, (out.shape, product.shape)
        out.copy_(out.double() + product if accumulate else product)
    return bias


def fused_multi_row_padding(
    inp: torch.Tensor, out: torch.Tensor, rows: list[int], padded: list[int]
) -> None:
    out.zero_()
    for part, into in zip(inp.split(rows), out.split(padded), strict=True):
        into[: len(part)] = part


def fused_multi_row_unpadding(
    inp: torch.Tensor, out: torch.Tensor, padded: list[int], rows: list[int]
) -> None:
    for part, into in zip(inp.split(padded), out.split(rows), strict=True):
        into.copy_(part[: len(into)])


FUNCTIONS = {
    function.__name__: function
    for function in (
        quantize,
        split_quantize,
        te_general_grouped_gemm,
        fused_multi_row_padding,
        fused_multi_row_unpadding,
    )
}
