"""FP8 on the GPU, compared with the torch twins; without a GPU, Triton interprets the kernels."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from guard import watched
from hypothesis import given, settings
from hypothesis import strategies as st
from test_grouped import SMALL as PLAIN
from test_grouped import dot
from triton.runtime.interpreter import InterpreterBuilder

import ultraep.ops.formats as formats
from ultraep.backends.triton import quantise
from ultraep.backends.triton.blocks import Blocks, capability_of, multiplies_e4m3
from ultraep.backends.triton.device import default_device, interpreted, launching
from ultraep.backends.triton.quantised import TritonQuantised
from ultraep.ops.activations import activation_named
from ultraep.ops.formats import E4M3, FORMATS
from ultraep.ops.products import Stacks, TorchProducts
from ultraep.ops.quantised import QuantisedProducts, QuantisedStacks

DEVICE = default_device()
KERNEL = "multiply_quantised"
BLOCKS = Blocks(16, 16, 128, stages=2, band=2, half=True)
SMALL = PLAIN | {(KERNEL, name): BLOCKS for name in FORMATS}
WIDE = PLAIN | {(KERNEL, "fp8"): Blocks(16, 256, 128, stages=2)}
SLOTS = {
    "mixed": ([5, 0, 17], [9, 3]),
    "no rows": ([0, 0], [0]),
    "no copies": ([16, 3, 2], []),
    "no homes": ([], [3, 0, 20]),
}
CAPACITY = 40
PACKING = [form for form in FORMATS.values() if form.packs]
by_name = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
packing = pytest.mark.parametrize("form", PACKING, ids=lambda form: form.name)
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def watch(monkeypatch):
    """Interpreted kernels access only their tensors, and compute as a GPU does."""
    if interpreted():
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    with watched() if interpreted() else nullcontext(), launching(DEVICE):
        yield


def engine(form, offsets, dtype, **options):
    return TritonQuantised(offsets, activation_named("swiglu"), dtype, form, **options)


def drawn(*shape, seed=0, dtype=torch.float32):
    """Numbers of many magnitudes, some of them zero."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=draw) * 2.0 ** torch.randint(
        -12, 8, shape, generator=draw
    )
    values[torch.rand(shape, generator=draw) < 0.1] = 0.0
    return values.to(DEVICE, dtype)


def quantised(form, weights, verbs=formats):
    data = torch.empty(weights.shape, dtype=E4M3, device=weights.device)
    shape = form.scale_shape(tuple(weights.shape))
    scales = torch.empty(shape, dtype=form.scale_type, device=weights.device)
    verbs.quantise(form, weights, data, scales)
    return data, scales


def same_bytes(one, other):
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@types
@by_name
@pytest.mark.parametrize("shape", [(2, 150, 200), (1, 128, 128), (3, 5, 33), (0, 4, 4)], ids=str)
def test_weights_are_quantised_and_made_plain_like_their_twins(form, shape, dtype):
    weights = drawn(*shape, dtype=dtype)
    data, scales = quantised(form, weights, quantise)
    for actual, expected in zip((data, scales), quantised(form, weights), strict=True):
        same_bytes(actual, expected)
    back = quantise.dequantise(form, data, scales, dtype)
    same_bytes(back, formats.dequantise(form, data, scales, dtype))


@pytest.mark.parametrize(
    ("promised", "kept", "written"), [(3, 3, False), (3, 1, True), (0, 0, True)]
)
def test_promised_weights_are_quantised_once(promised, kept, written):
    form, weights = FORMATS["fp8"], drawn(2, 130, 140)
    data, scales = expected = quantised(form, weights)
    actual = torch.zeros_like(data), torch.zeros_like(scales)
    numbers = [torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (promised, kept)]
    quantise.quantise(form, weights, *actual, tuple(numbers))
    for values, like in zip(actual, expected, strict=True):
        same_bytes(values, like if written else torch.zeros_like(like))


@types
@packing
@pytest.mark.parametrize("shape", [(7, 300), (3, 128), (2, 16), (0, 16)], ids=str)
def test_rows_are_packed_like_their_twins(form, shape, dtype):
    rows = drawn(*shape, dtype=dtype)
    packed, expected = quantise.pack(form, rows), formats.pack(form, rows)
    for actual, like in zip(*(form.parts(p, shape[1]) for p in (packed, expected)), strict=True):
        same_bytes(actual, like)
    plain = quantise.unpack(form, packed, shape[1], dtype)
    same_bytes(plain, formats.unpack(form, expected, shape[1], dtype))


def test_rows_behind_the_last_are_left_alone():
    form, rows = FORMATS["fp8"], drawn(5, 64)
    packed = quantise.pack(form, rows)
    end = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    plain = quantise.unpack(form, packed, 64, torch.float32, end)
    same_bytes(plain[:3], formats.unpack(form, packed, 64, torch.float32)[:3])


@settings(max_examples=50)
@given(
    st.lists(st.integers(-30, 30), min_size=2, max_size=5),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_groups_of_a_row_share_a_scale_in_reach(sizes, seed, zero):
    """Groups within a factor of 16 of the largest share its scale; errors stay in bounds."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(1, 128 * len(sizes), generator=draw)
    rows *= 2.0 ** torch.tensor(sizes).repeat_interleave(128)
    rows[:, :128] *= not zero
    form, width = FORMATS["fp8"], rows.shape[1]
    packed = formats.pack(form, rows)
    _, scales = form.parts(packed, width)
    largest = rows.abs().view(1, -1, 128).amax(dim=2)
    least = 2.0 ** (formats.exponents_of(largest) - formats.ONE)
    top = scales[largest > 0].max()
    for scale, needed, size in zip(scales[0], least[0], largest[0], strict=True):
        assert scale == (top if size == 0 or top <= 16 * needed else needed)
    error = (formats.unpack(form, packed, width, torch.float32) - rows).abs()
    allowed = torch.maximum(2.0**-4 * rows.abs(), 2.0**-10 * scales.repeat_interleave(128, dim=1))
    assert (error <= allowed).all()


@settings(max_examples=50)
@given(st.lists(st.floats(width=32, allow_infinity=False, allow_nan=False), min_size=8, max_size=8))
def test_any_number_is_encoded_as_torch_does(values):
    form, rows = FORMATS["fp8"], torch.tensor([values], device=DEVICE)
    same_bytes(*(form.parts(v.pack(form, rows), 8)[0] for v in (quantise, formats)))


def test_all_codes_are_read_as_torch_does():
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(1, 2, 128)
    scales = torch.ones(1, 2, 1, device=DEVICE)
    plain = quantise.dequantise(FORMATS["fp8_rows"], codes.view(E4M3), scales, torch.float32)
    torch.testing.assert_close(plain, codes.view(E4M3).float(), rtol=0, atol=0, equal_nan=True)


def test_what_is_no_number_stays_none():
    rows = drawn(3, 256)
    rows[0, 3], rows[1, 200] = float("nan"), float("inf")
    for verbs in (formats, quantise):
        data, _ = FORMATS["fp8"].parts(verbs.pack(FORMATS["fp8"], rows), 256)
        assert data[:2].float().isnan().sum(dim=1).tolist() == [1, 1]
        assert not data[2].float().isnan().any()


class Case:
    """Rows of some slots, FP8 weights, and both engines."""

    def __init__(self, form, name="mixed", dtype=torch.float32, table=SMALL, depth=300, width=40):
        counts = SLOTS[name]
        self.total, self.form, self.dtype = sum(map(sum, counts)), form, dtype
        begins = torch.tensor([0, *counts[0], *counts[1]]).cumsum(0)
        plain = TorchProducts(begins.tolist(), activation_named("swiglu"), bitwise=True)
        self.twin = QuantisedProducts(plain, form, dtype)
        offsets = begins.to(DEVICE, torch.int32)
        self.kernels = engine(form, offsets, dtype, programs=2, table=table)
        self.rows = drawn(CAPACITY, depth, dtype=dtype, seed=1)
        self.scale = drawn(CAPACITY, seed=2)
        stacks = [quantised(form, drawn(len(n), width, depth, seed=3)) for n in counts]
        self.bias = Stacks(*(drawn(len(n), width, seed=4) for n in counts))
        self.weights = QuantisedStacks(*(Stacks(*pair) for pair in zip(*stacks, strict=True)))


def close(actual, expected, dtype=torch.float32):
    error = 1e-5 if dtype == torch.float32 else 1e-2
    limit = expected.abs().max().item() if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=error, atol=error * limit)


@by_name
@pytest.mark.parametrize(
    ("name", "dtype"), [("mixed", torch.float32), *((name, torch.bfloat16) for name in SLOTS)]
)
def test_products_are_those_of_the_twin(form, name, dtype):
    case = Case(form, name, dtype)
    packed = case.twin.packed(case.rows)
    for bias, scale in ((None, None), (case.bias, case.scale)):
        actual = case.kernels.multiply(packed, case.weights, bias, scale=scale)
        expected = case.twin.multiply(packed, case.weights, bias, scale=scale)
        close(actual[: case.total], expected[: case.total], dtype)


@pytest.mark.parametrize("name", ["mixed", "no copies"])
def test_products_with_any_scales_are_those_of_the_twin(name):
    """Scales of a checkpoint need not be powers of two."""
    case = Case(FORMATS["fp8"], name, depth=512, width=272, table=WIDE)
    for stack in (case.weights.scales.homes, case.weights.scales.copies):
        stack *= 1 + torch.rand(stack.shape, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    packed = case.twin.packed(case.rows)
    actual = case.kernels.multiply(packed, case.weights, None)
    close(actual[: case.total], case.twin.multiply(packed, case.weights, None)[: case.total])


@pytest.mark.parametrize("changing", [False, True])
def test_sums_are_scaled_only_where_scales_change(changing):
    case = Case(FORMATS["fp8"], depth=512, width=272, table=WIDE)
    case.rows.clamp_(0.5, 0.75)
    if changing:
        case.rows[7, 128:256] *= 2.0**-9
    packed = case.twin.packed(case.rows)
    _, scales = FORMATS["fp8"].parts(packed, 512)
    blocks = WIDE[KERNEL, "fp8"]
    order = case.kernels._products.tile_order(CAPACITY, blocks)
    _, changes = case.kernels.row_ratios(scales, order, blocks)
    marked = [[0, 0, 0, 1]] * int(order[0])  # behind the last group, the unit is 1
    marked[1] = [1, 1, 0, 1] if changing else marked[1]
    assert changes[: len(marked)].tolist() == marked
    actual = case.kernels.multiply(packed, case.weights, None)
    close(actual[: case.total], case.twin.multiply(packed, case.weights, None)[: case.total])


@types
@packing
def test_what_stands_between_products_is_that_of_the_twin(form, dtype):
    case = Case(form, dtype=dtype)
    up = drawn(CAPACITY, 2 * 200, dtype=dtype).clamp(-9, 9)
    actual = case.kernels.activate(up)[: case.total]
    both = [case.form.parts(p, 200) for p in (actual, case.twin.activate(up)[: case.total])]
    (data, scales), (expected, wanted_scales) = both
    same = (scales == wanted_scales).float().mean()
    assert same > 0.98  # a sigmoid of another library may round to another power of two
    error = formats.unpack(form, actual, 200, torch.float32) - activation_named("swiglu").apply(
        up[: case.total].float()
    )
    assert (error.abs() <= 2.0**-4 * up.abs().max() ** 2).all()
    assert (data.view(torch.uint8) == expected.view(torch.uint8)).float().mean() > 0.98


@packing
def test_backward_uses_dequantised_numbers(form):
    case, results = Case(form), []
    packed, d_out = case.twin.packed(case.rows), drawn(CAPACITY, 40, seed=5)
    for products in (case.kernels, case.twin):
        d_rows = products.multiply_transposed(d_out, case.weights)
        into = Stacks(*(torch.empty(n, 40, 300, device=DEVICE) for n in (3, 2)))
        products.weight_gradients(d_out, packed, into, None)
        results.append((d_rows[: case.total], into.homes, into.copies))
    for result, expected in zip(*results, strict=True):
        close(result, expected)


@types
@packing
def test_bits_of_a_row_do_not_depend_on_its_place(form, dtype):
    """The same rows and weights in slots of other sizes, and in another order."""
    case = Case(form, "no copies", dtype)
    assert_same_bits(case.form, case.rows[:21], case.weights, [0, 9, 9, 21], table=SMALL)


def assert_same_bits(form, rows, weights, ends, **options):
    """One slot, or several with the same weights and the rows in another order."""
    order, results = torch.randperm(len(rows)).to(DEVICE), []
    packed, homes = quantise.pack(form, rows), (weights.data.homes, weights.scales.homes)
    for begins, moved in (([0, len(rows)], packed), (ends, packed[order])):
        count = len(begins) - 2  # of home slots; the last slot is a spare one
        repeated = [Stacks(t[:1].repeat(count, 1, 1), t[:1].clone()) for t in homes]
        if not count:
            repeated = [Stacks(t[:1], t[:0]) for t in homes]
        offsets = torch.tensor(begins, dtype=torch.int32, device=DEVICE)
        products = engine(form, offsets, rows.dtype, **options)
        results.append(products.multiply(moved, QuantisedStacks(*repeated), None))
    assert torch.equal(results[0][order], results[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@packing
@pytest.mark.parametrize("sizes", [(1536, 1024), (2880, 2880), (200, 300)], ids=str)
def test_large_products(form, sizes):
    """With blocks as in use: near the product of the dequantised numbers."""
    height, width = sizes
    counts = [700, 0, 1, 513]
    begins = torch.tensor([0, *counts]).cumsum(0)
    rows = torch.randn(1500, width, device=DEVICE, dtype=torch.bfloat16)
    data, scales = quantised(form, torch.randn(4, height, width, device=DEVICE) * width**-0.5)
    stacks = QuantisedStacks(Stacks(data[:3], data[3:]), Stacks(scales[:3], scales[3:]))
    packed = quantise.pack(form, rows)
    for native in {False, multiplies_e4m3(*capability_of(DEVICE))}:
        products = engine(form, begins.to(DEVICE, torch.int32), rows.dtype, native=native)
        out = rows.new_full((1500, height), 7.0)
        products.multiply(packed, stacks, None, out=out)
        plain = formats.dequantise(form, data, scales, torch.float32)
        exact = formats.unpack(form, packed, width, torch.float32)
        for slot, (begin, end) in enumerate(pairwise(begins.tolist())):
            expected = exact[begin:end].double() @ plain[slot].double().T
            error = (out[begin:end].double() - expected).norm() / expected.norm().clamp(min=1e-30)
            assert error < 5e-3, error
        assert (out[begins[-1] :] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@packing
def test_bits_do_not_depend_on_the_place_in_the_tiles_of_this_gpu(form):
    """In one slot, or in two of which one ends with half a tile."""
    rows = torch.randn(700, 1024, device=DEVICE, dtype=torch.bfloat16)
    data, scales = quantised(form, torch.randn(1, 512, 1024, device=DEVICE))
    weights = QuantisedStacks(Stacks(data, data[:0]), Stacks(scales, scales[:0]))
    assert_same_bits(form, rows, weights, [0, 170, 700])
