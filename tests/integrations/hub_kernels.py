"""Strict stand-ins for the kernels that transformers downloads for quantised experts.

The kernels need a GPU and the `kernels` package. These functions have their signatures and refuse
the calls that they refuse. They multiply every row on its own, so that the output of a row has the
same bits beside any other rows.

    finegrained-fp8             matmul_2d, matmul_batched, matmul_grouped
    gpt-oss-triton-kernels      matmul_ogs, routing, swiglu, tensor, tensor_details

Shapes: S rows, E experts, N and K of a weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.integrations.finegrained_fp8 as fp8
import transformers.integrations.hub_kernels as hub_kernels
import transformers.integrations.mxfp4 as mxfp4
import transformers.quantizers.quantizer_finegrained_fp8 as fp8_quantizer
import transformers.quantizers.quantizer_mxfp4 as mxfp4_quantizer

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LARGEST = 448.0
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
ROWS = (torch.float32, torch.bfloat16, torch.float16)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the FP4 numbers of bytes with two codes each, the low one first."""
    codes = packed.view(torch.uint8).long()
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return torch.cat([FP4, -FP4])[codes]


def spread(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    wide = scales.float().repeat_interleave(rows // scales.shape[-2], dim=-2)
    return wide.repeat_interleave(columns // scales.shape[-1], dim=-1)


def quantised_row(row: torch.Tensor, width: int, static: torch.Tensor | None) -> torch.Tensor:
    """Round a row to e4m3 in groups, as the kernels do before they multiply."""
    groups = row.float().unflatten(0, (-1, width))
    scale = groups.abs().amax(dim=1, keepdim=True) / LARGEST if static is None else static.float()
    scale = torch.as_tensor(scale).clamp(min=1e-12)
    return ((groups / scale).to(E4M3).float() * scale).flatten()


def multiply(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply rows [S, K] with the transpose of one weight [N, K], or of [N, K / 2] bytes."""
    assert A.ndim == 2
    assert A.dtype in ROWS
    assert B.dtype in (E4M3, torch.int8)
    assert Bs.dtype in (torch.float32, E8M0)
    assert B.is_contiguous()
    assert Bs.is_contiguous()
    weight = unpacked(B) if B.dtype == torch.int8 else B.float()
    (rows, columns), width = weight.shape, 32
    assert A.shape[1] == columns
    if B.dtype == torch.int8:
        assert Bs.dtype == E8M0
        assert Bs.shape == (rows, columns // 32)
    elif block_size is None or list(block_size) == [rows, columns]:
        assert Bs.numel() == 1
        Bs, width = Bs.reshape(1, 1), columns
    else:
        height, width = block_size
        assert rows % height == 0
        assert columns % width == 0
        assert Bs.shape == (rows // height, columns // width)
    weight = weight * spread(Bs, rows, columns)
    products = [weight @ quantised_row(row, width, activation_scale) for row in A]
    result = torch.stack(products) if products else A.new_empty(0, rows)
    return result.to(output_dtype or A.dtype)


@torch.no_grad()  # the kernels have no backward
def matmul_2d(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
    activation_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    assert B.ndim == 2
    assert activation_scale is None or activation_scale.numel() == 1
    rows = A.reshape(-1, A.shape[-1])
    result = multiply(rows, B, Bs, block_size, output_dtype, activation_scale)
    return result.view(*A.shape[:-1], -1)


@torch.no_grad()
def matmul_batched(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    expert_ids: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    assert B.ndim == Bs.ndim == 3
    assert B.is_contiguous()
    assert expert_ids.shape == A.shape[:1]
    assert ((expert_ids >= 0) & (expert_ids < len(B))).all()
    results = [
        multiply(row[None], B[expert], Bs[expert], block_size, output_dtype)
        for row, expert in zip(A, expert_ids.tolist(), strict=True)
    ]
    return torch.cat(results)


@torch.no_grad()
def matmul_grouped(
    A: torch.Tensor,
    B: torch.Tensor,
    Bs: torch.Tensor,
    offsets: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    block_size: Any,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    assert A.is_contiguous()
    assert B.is_contiguous()
    assert B.ndim == Bs.ndim == 3
    assert len(B) == len(Bs) == len(offsets) == len(tokens_per_expert)
    assert offsets.dtype == torch.int32
    counts = tokens_per_expert.to(torch.int64)
    assert torch.equal(counts.cumsum(0), offsets.to(torch.int64))
    assert int(offsets[-1]) == len(A)
    parts = zip(A.split(counts.tolist()), B, Bs, strict=True)
    return torch.cat([multiply(*part, block_size, output_dtype) for part in parts])


@contextmanager
def fp8_kernels() -> Iterator[None]:
    """Load FP8 models on a CPU without dequantising them, and multiply with the stand-ins."""
    kernels = fp8.FineGrainedFP8(
        matmul=matmul_2d, batched_matmul=matmul_batched, grouped_matmul=matmul_grouped
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "_FINEGRAINED_FP8", kernels)
        patch.setattr(
            fp8_quantizer.FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None
        )
        yield


class StridedLayout:
    """Memory in the order of the tensor."""

    name = None

    def __init__(self, shape: Any) -> None:
        self.initial_shape = shape

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        return data

    unswizzle_data = swizzle_data


class FourRows(StridedLayout):
    """Four columns of a weight side by side, column-major, as the layouts of Hopper do."""

    name = "FOUR_ROWS"

    def __init__(self, shape: Any, mx_axis: int) -> None:
        super().__init__(shape)
        assert mx_axis == 1

    def swizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        rows = data.mT
        groups = rows.unflatten(1, (-1, 4)).transpose(2, 3)
        return groups.reshape(len(rows), rows.shape[1] // 4, -1).mT

    def unswizzle_data(self, data: torch.Tensor) -> torch.Tensor:
        groups = data.mT.unflatten(2, (-1, 4)).transpose(2, 3)
        return groups.reshape(len(data), -1, groups.shape[-1]).mT


def record(name: str, *fields: str, **defaults: Any) -> Any:
    """Return a class of the kernels that only holds values."""
    optional = [(field, Any, value) for field, value in defaults.items()]
    return make_dataclass(name, [*((field, Any) for field in fields), *optional])


Storage = record("Storage", "data", layout=None)
Tensor = record("Tensor", "storage", dtype=None, shape=None, shape_max=None)  # shape: of numbers
PrecisionConfig = record("PrecisionConfig", weight_scale=None, flex_ctx=None)
RoutingData = record(
    "RoutingData", "gate_scal", "expt_hist", "n_expts_tot", "n_expts_act", expt_data=None
)
Indices = record("Indices", "src_indx", "dst_indx")
FnSpecs = record("FnSpecs", "name", "fn", "fn_arg_names")
FusedActivation = record("FusedActivation", "specs", "fn_args", "reduction_n")
FP4_TYPE = SimpleNamespace(bitwidth=4)


def wrap_torch_tensor(data: torch.Tensor, dtype: Any = None) -> Tensor:
    shape = list(data.shape)
    shape[data.stride().index(1)] *= 1 if dtype is None else 8 // dtype.bitwidth
    return Tensor(Storage(data, StridedLayout(data.shape)), dtype or data.dtype, shape, list(shape))


def convert_layout(tensor: Tensor, layout: Any, **options: Any) -> Tensor:
    data = tensor.storage.layout.unswizzle_data(tensor.storage.data)
    own = layout(data.shape, **options)
    storage = Storage(own.swizzle_data(data), own)
    return Tensor(storage, tensor.dtype, tensor.shape, tensor.shape_max)


def compute_expt_data(expt_hist: torch.Tensor, n_expts_tot: int, n_gates: int) -> Any:
    assert expt_hist.dtype == torch.int32
    assert len(expt_hist) == n_expts_tot
    assert int(expt_hist.sum()) == n_gates
    return SimpleNamespace(hist=expt_hist)


def routing(logits: torch.Tensor, n_expts_act: int) -> tuple[RoutingData, Indices, Indices]:
    """Choose experts; choices of a token are sorted by expert, and all choices, too."""
    values, ids = logits.topk(n_expts_act)
    gates = values.softmax(-1)
    ids, order = ids.sort(dim=1)
    gates = gates.gather(1, order)
    hist = torch.bincount(ids.flatten(), minlength=logits.shape[1]).int()
    topk_indx = ids.flatten().argsort(stable=True)
    gate_indx = topk_indx.argsort().int()
    data = compute_expt_data(hist, logits.shape[1], ids.numel())
    sorted_gates = gates.flatten()[topk_indx]
    topk_indx = topk_indx.int()
    routed = RoutingData(sorted_gates, hist, logits.shape[1], n_expts_act, data)
    return routed, Indices(topk_indx, gate_indx), Indices(gate_indx, topk_indx)


def swiglu(row: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, linear = row[0::2].clamp(max=limit), row[1::2].clamp(-limit, limit)
    scaled = gate * torch.sigmoid(alpha * gate)
    return scaled * linear + scaled


@torch.no_grad()  # MXFP4 models cannot be trained
def matmul_ogs(
    x: torch.Tensor,
    w: Tensor,
    bias: torch.Tensor,
    routing_data: RoutingData,
    *,
    gather_indx: Indices | None = None,
    scatter_indx: Indices | None = None,
    precision_config: PrecisionConfig,
    gammas: torch.Tensor | None = None,
    fused_activation: FusedActivation | None = None,
) -> torch.Tensor:
    """Multiply rows, gathered from tokens or scattered to them, with MXFP4 weights [E, K, N]."""
    scale, hist = precision_config.weight_scale, routing_data.expt_hist
    assert x.dtype in ROWS
    assert scale is not None
    assert w.dtype is FP4_TYPE
    assert w.storage.data.dtype == scale.storage.data.dtype == torch.uint8
    assert w.storage.data.stride(-2) == 1, "`w` must be column-major when it has data-type mxfp"
    assert bias.dtype == torch.float32
    experts, columns, rows = w.shape
    assert x.shape[1] == columns
    assert experts == len(w.storage.data) == len(scale.storage.data) == len(bias) == len(hist)
    assert list(w.shape_max) == list(w.shape)
    assert routing_data.n_expts_tot == experts
    assert routing_data.expt_data.hist is hist
    assert scale.storage.data.shape == (experts, columns // 32, rows)
    codes = w.storage.layout.unswizzle_data(w.storage.data).mT.contiguous()
    scales = scale.storage.layout.unswizzle_data(scale.storage.data).mT
    active = routing_data.n_expts_act
    order = torch.arange(int(hist.sum())) if gather_indx is None else gather_indx.src_indx // active
    outputs = []
    for index, part in enumerate(order.long().split(hist.tolist())):
        powers = torch.exp2(scales[index].float() - 127)
        weight = unpacked(codes[index]) * powers.repeat_interleave(32, dim=1)
        for token in part.tolist():
            outputs.append(weight @ x[token].float().clone() + bias[index])
    if fused_activation is not None:
        assert fused_activation.specs.name == "swiglu"
        assert fused_activation.reduction_n == 2
        outputs = [swiglu(row, *fused_activation.fn_args) for row in outputs]
    stacked = torch.stack(outputs)
    if gammas is not None:
        stacked = stacked * gammas[:, None]
    stacked = stacked.to(x.dtype)
    if scatter_indx is None:
        return stacked
    return stacked[scatter_indx.src_indx.long()].unflatten(0, (-1, active)).sum(dim=1)


HUB = SimpleNamespace(
    matmul_ogs=SimpleNamespace(
        FnSpecs=FnSpecs,
        FusedActivation=FusedActivation,
        matmul_ogs=matmul_ogs,
        PrecisionConfig=PrecisionConfig,
        FlexCtx=SimpleNamespace,
        InFlexData=SimpleNamespace,
    ),
    routing=SimpleNamespace(
        routing=routing,
        GatherIndx=Indices,
        ScatterIndx=Indices,
        RoutingData=RoutingData,
        compute_expt_data=compute_expt_data,
    ),
    swiglu=SimpleNamespace(swiglu_fn=swiglu),
    tensor=SimpleNamespace(
        FP4=FP4_TYPE, convert_layout=convert_layout, wrap_torch_tensor=wrap_torch_tensor
    ),
    tensor_details=SimpleNamespace(
        layout=SimpleNamespace(
            StridedLayout=StridedLayout,
            make_default_matmul_mxfp4_w_layout=lambda mx_axis: (FourRows, {"mx_axis": mx_axis}),
        )
    ),
)


def _replace_experts(self: Any, model: Any, **_: Any) -> None:
    self.modules_to_not_convert = self.get_modules_to_not_convert(
        model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
    )
    mxfp4.replace_with_mxfp4_linear(
        model,
        modules_to_not_convert=self.modules_to_not_convert,
        quantization_config=self.quantization_config,
    )


@contextmanager
def mxfp4_kernels() -> Iterator[None]:
    """Load MXFP4 models on a CPU without dequantising them, and multiply with the stand-ins."""
    quantizer = mxfp4_quantizer.Mxfp4HfQuantizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_kernels, "get_kernel", lambda _name, version: HUB if version == 1 else 0)
        patch.setattr(quantizer, "validate_environment", lambda *_, **__: None)
        patch.setattr(quantizer, "_process_model_before_weight_loading", _replace_experts)
        yield
