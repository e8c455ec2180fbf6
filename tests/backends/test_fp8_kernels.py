"""FP8 on the GPU, compared with the torch twins; without a GPU, Triton interprets the kernels."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grouped import LOW, watch  # noqa: F401  a fixture of all tests here

from ultraep.backends.triton import fp8 as kernels
from ultraep.backends.triton import products as triton_products
from ultraep.backends.triton.blocks import Blocks, multiplies_e4m3
from ultraep.backends.triton.device import default_device
from ultraep.ops import fp8
from ultraep.ops.fp8 import E4M3, dequantise, pack, parts
from ultraep.ops.products import Stacks, TorchProducts, activation_named

DEVICE = default_device()
SMALL = LOW | {("multiply", 1): Blocks(16, 16, 128, stages=2, band=2, half=True)}
SLOTS = {
    "mixed": ([5, 0, 17], [9, 3]),
    "no rows": ([0, 0], [0]),
    "no replicas": ([16, 3, 2], []),
    "no homes": ([], [3, 0, 20]),
}
CAPACITY = 40
TYPES = [torch.float32, torch.bfloat16]
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def engine(offsets, dtype, **options):
    swiglu = activation_named("swiglu")
    return triton_products.TritonProducts(offsets, swiglu, dtype, fp8=True, **options)


def drawn(*shape, seed=0, dtype=torch.float32):
    """Numbers of many magnitudes, some of them zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw) * 2.0 ** torch.randint(
        -12, 8, shape, generator=draw
    )
    values[torch.rand(shape, generator=draw) < 0.1] = 0.0
    return values.to(DEVICE, dtype)


def quantised(values, quantise=fp8.quantise):
    codes = torch.empty(values.shape, dtype=E4M3, device=values.device)
    scales = torch.empty(*values.shape[:-1], 1, device=values.device)
    quantise(values, codes, scales)
    return codes, scales


def same_bytes(one, other):
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@types
@pytest.mark.parametrize("shape", [(2, 150, 200), (3, 5, 33), (0, 4, 4)], ids=str)
def test_weights_are_quantised_like_their_twins(shape, dtype):
    weights = drawn(*shape, dtype=dtype)
    for values in (weights, weights.mT):
        for actual, expected in zip(
            quantised(values, kernels.quantise), quantised(values), strict=True
        ):
            same_bytes(actual, expected)


@types
@pytest.mark.parametrize("shape", [(7, 300), (2, 16), (0, 16)], ids=str)
def test_rows_are_packed_like_their_twins(shape, dtype):
    rows = drawn(*shape, dtype=dtype)
    both = [parts(pack(rows, function), shape[1]) for function in (kernels.quantise, fp8.quantise)]
    for actual, expected in zip(*both, strict=True):
        same_bytes(actual, expected)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16], ids=str)
def test_all_codes_are_dequantised_like_their_twins(dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 6, 1).to(DEVICE).view(E4M3)
    scales = drawn(2, 6, 1, seed=1).abs()
    expected = dequantise(codes, scales, dtype)
    torch.testing.assert_close(
        kernels.dequantise(codes, scales, dtype), expected, rtol=0, atol=0, equal_nan=True
    )
    used = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    some = kernels.dequantise(codes[0], scales[0], dtype, used)[:5]
    torch.testing.assert_close(some, expected[0, :5], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=50)
@given(st.lists(st.floats(width=32, allow_infinity=False, allow_nan=False), min_size=8, max_size=8))
def test_any_number_is_rounded_within_bounds_as_torch_does(values):
    rows = torch.tensor([values], device=DEVICE)
    codes, scales = quantised(rows)
    same_bytes(codes, quantised(rows, kernels.quantise)[0])
    assert scales.log2() == scales.log2().round()
    error = (dequantise(codes, scales, torch.float64) - rows).abs()
    assert (error <= torch.maximum(2.0**-4 * rows.abs(), 2.0**-10 * scales)).all()


def test_what_is_no_number_stays_none():
    rows = drawn(3, 256)
    rows[0, 3], rows[1, 200] = float("nan"), float("inf")
    for quantise in (fp8.quantise, kernels.quantise):
        codes, _ = quantised(rows, quantise)
        assert codes[:2].float().isnan().sum(dim=1).tolist() == [1, 1]
        assert not codes[2].float().isnan().any()


class Case:
    """Rows of some slots, FP8 weights, and both engines."""

    def __init__(self, name="mixed", dtype=torch.float32, table=SMALL, depth=300, width=40):
        counts = SLOTS[name]
        self.total, self.dtype = sum(map(sum, counts)), dtype
        begins = torch.tensor([0, *counts[0], *counts[1]]).cumsum(0)
        swiglu = activation_named("swiglu")
        self.twin = TorchProducts(begins.tolist(), swiglu, bitwise=True, fp8=dtype)
        offsets = begins.to(DEVICE, torch.int32)
        self.kernels = engine(offsets, dtype, programs=2, table=table)
        self.rows = drawn(CAPACITY, depth, dtype=dtype, seed=1)
        self.scale = drawn(CAPACITY, seed=2)
        stacks = [quantised(drawn(len(n), width, depth, seed=3)) for n in counts]
        self.bias = Stacks(*(drawn(len(n), width, seed=4) for n in counts))
        codes, scales = (Stacks(*pair) for pair in zip(*stacks, strict=True))
        self.weights = replace(codes, scales=scales)
        self.packed = pack(self.rows)


def close(actual, expected, dtype=torch.float32):
    error = 1e-5 if dtype == torch.float32 else 1e-2
    limit = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=error, atol=error * limit)


@pytest.mark.parametrize("any_scales", [False, True], ids=["powers of two", "any scales"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("mixed", torch.float32), *((name, torch.bfloat16) for name in SLOTS)]
)
def test_products_are_those_of_the_twin(name, dtype, any_scales):
    """Scales of a checkpoint need not be powers of two."""
    case = Case(name, dtype)
    for stack in (case.weights.scales.homes, case.weights.scales.replicas) if any_scales else ():
        stack *= 1 + torch.rand(stack.shape, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    for bias, scale in ((None, None), (case.bias, case.scale)):
        actual = case.kernels.multiply(case.packed, case.weights, bias, scale=scale)
        expected = case.twin.multiply(case.packed, case.weights, bias, scale=scale)
        close(actual[: case.total], expected[: case.total], dtype)


def test_gpus_that_cannot_multiply_e4m3_dequantise(monkeypatch):
    monkeypatch.setattr(triton_products, "multiplies_e4m3", lambda device: False)
    case = Case()
    actual = case.kernels.multiply(case.packed, case.weights, case.bias)
    expected = case.twin.multiply(case.packed, case.weights, case.bias)
    close(actual[: case.total], expected[: case.total])


@types
def test_what_stands_between_products_is_that_of_the_twin(dtype):
    case = Case(dtype=dtype)
    up = drawn(CAPACITY, 2 * 200, dtype=dtype).clamp(-9, 9)
    actual, expected = (
        parts(products.activate(up)[: case.total], 200) for products in (case.kernels, case.twin)
    )
    # A sigmoid of another library may round to another power of two.
    for one, other in zip(actual, expected, strict=True):
        assert (one.float() == other.float()).float().mean() > 0.98
    error = dequantise(*actual, torch.float32) - activation_named("swiglu").apply(
        up[: case.total].float()
    )
    assert (error.abs() <= 2.0**-4 * up.abs().max() ** 2).all()


def test_backward_uses_dequantised_numbers():
    case, results = Case(), []
    d_out = drawn(CAPACITY, 40, seed=5)
    for products in (case.kernels, case.twin):
        d_rows = products.multiply_transposed(d_out, case.weights)
        into = Stacks(*(torch.empty(n, 40, 300, device=DEVICE) for n in (3, 2)))
        products.weight_gradients(d_out, case.packed, into, None)
        results.append([d_rows[: case.total], into.homes, into.replicas])
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)


@types
def test_bits_do_not_depend_on_the_place(dtype):
    case = Case("no replicas", dtype)
    assert_same_bits(case.rows[:21], case.weights, [0, 9, 9, 21], table=SMALL)


def assert_same_bits(rows, weights, ends, **options):
    """One slot, or several with the same weights and the rows in another order."""
    order, results = torch.randperm(len(rows)).to(DEVICE), []
    packed, homes = pack(rows), (weights.homes, weights.scales.homes)
    for begins, moved in (([0, len(rows)], packed), (ends, packed[order])):
        count = len(begins) - 2  # of home slots; the last slot is a spare one
        repeated = [Stacks(t[:1].repeat(count, 1, 1), t[:1].clone()) for t in homes]
        if not count:
            repeated = [Stacks(t[:1], t[:0]) for t in homes]
        offsets = torch.tensor(begins, dtype=torch.int32, device=DEVICE)
        products = engine(offsets, rows.dtype, **options)
        stacks = replace(repeated[0], scales=repeated[1])
        results.append(products.multiply(moved, stacks, None))
    assert torch.equal(results[0][order], results[1])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1536, 1024), (2880, 2880), (200, 300)], ids=str)
def test_large_products(sizes):
    """With the tiles of this GPU: near the product of the dequantised numbers."""
    assert multiplies_e4m3(DEVICE)
    height, width = sizes
    begins = torch.tensor([0, 700, 0, 1, 513]).cumsum(0)
    rows = torch.randn(1500, width, device=DEVICE, dtype=torch.bfloat16)
    codes, scales = quantised(torch.randn(4, height, width, device=DEVICE) * width**-0.5)
    weights = Stacks(codes[:3], codes[3:], scales=Stacks(scales[:3], scales[3:]))
    packed, out = pack(rows, kernels.quantise), rows.new_full((1500, height), 7.0)
    products = engine(begins.to(DEVICE, torch.int32), rows.dtype)
    products.multiply(packed, weights, None, out=out)
    plain = dequantise(codes, scales, torch.float64)
    exact = dequantise(*parts(packed, width), torch.float64)
    for slot, (begin, end) in enumerate(pairwise(begins.tolist())):
        expected = exact[begin:end] @ plain[slot].T
        error = (out[begin:end].double() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < 5e-3, error
    assert (out[begins[-1] :] == 7.0).all()


@pytest.mark.gpu
def test_bits_do_not_depend_on_the_place_in_the_tiles_of_this_gpu():
    """In one slot, or in two of which one ends with half a tile."""
    rows = torch.randn(700, 1024, device=DEVICE, dtype=torch.bfloat16)
    codes, scales = quantised(torch.randn(1, 512, 1024, device=DEVICE))
    weights = Stacks(codes, codes[:0], scales=Stacks(scales, scales[:0]))
    assert_same_bits(rows, weights, [0, 170, 700])
