"""Products of all slots on the GPU; without a GPU, Triton interprets the kernels."""

from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from guard import watched
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ultraep.backends.triton import scaling as kernels
from ultraep.backends.triton.blocks import TABLES, Blocks
from ultraep.backends.triton.device import default_device, interpreted, launching
from ultraep.backends.triton.kernels.grouped import work_of_product
from ultraep.backends.triton.kernels.tiles import finish, first_tile, lay_tiles, next_tile
from ultraep.backends.triton.launch import matrix
from ultraep.backends.triton.products import TritonProducts
from ultraep.ops import products as torch_products
from ultraep.ops.products import Beside, Stacks, activation_named, swiglu

DEVICE = default_device()
CAPACITY, N, K = 40, 40, 24
SMALL = dict.fromkeys(TABLES["cuda"], Blocks(16, 16, 16, stages=2, band=2))
LOW = dict.fromkeys(SMALL, Blocks(16, 32, 16, stages=2, band=2, half=True))
SLOTS = {  # rows of the home slots, and of the spare slots
    "mixed": ([5, 0, 17], [9, 3]),
    "full": ([20, 1], [19]),
    "no rows": ([0, 0], [0]),
    "one slot": ([0, 0, 37], [0]),
    "one copy": ([0], [0, 33]),
    "no replicas": ([16, 3, 2], []),
    "no homes": ([], [3, 0, 20]),
    "few rows": ([5, 0, 8], [3, 1]),
}
NAN, KEPT = float("nan"), 7.0
PRECISION = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SINGLE, HALF = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def watch(monkeypatch):
    """Interpreted kernels access only their tensors, and compute as a GPU does."""
    if interpreted():
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    with watched() if interpreted() else nullcontext(), launching(DEVICE):
        yield


def dot(self, left, right, added, *_):
    """Multiply tiles for Triton's interpreter, whose own function reads bfloat16 as integers.

    Every element is summed on its own, in one order, as on a GPU; a CPU library may not do that.
    """
    left, right, total = as_float32(left), as_float32(right), added.data.copy()
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k]
    return TensorHandle(total, added.dtype.scalar)


def as_float32(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    if handle.dtype.scalar == tl.float8e4nv:
        codes = torch.from_numpy(np.ascontiguousarray(handle.data))
        return codes.view(torch.float8_e4m3fn).float().numpy()
    return handle.data.astype(np.float32)


def products_for(offsets, dtype=SINGLE, programs=2, table=SMALL):
    return TritonProducts(offsets, activation_named("swiglu"), dtype, programs, table)


class Case:
    """Rows of some slots; behind them, NaN that no kernel may read."""

    def __init__(self, name="mixed", dtype=SINGLE, seed=0):
        homes, replicas = SLOTS[name]
        self.counts, self.homes, self.replicas = homes + replicas, len(homes), len(replicas)
        self.total, self.dtype = sum(self.counts), dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.offsets = torch.tensor([0, *self.counts]).cumsum(0).to(DEVICE, torch.int32)
        self.products = products_for(self.offsets, dtype)

    def random(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.generator).to(DEVICE, dtype or self.dtype)

    def rows(self, *width, dtype=None):
        rows = self.random(CAPACITY, *width, dtype=dtype)
        rows[self.total :] = NAN
        return rows

    def empty(self, *width, dtype=None):
        return torch.full((CAPACITY, *width), KEPT, dtype=dtype or self.dtype, device=DEVICE)

    def stacks(self, *shape, dtype=None):
        homes, replicas = (self.random(n, *shape, dtype=dtype) for n in (self.homes, self.replicas))
        return Stacks(homes, padded(replicas))

    def each(self, *stacks):
        parts = [slice(begin, end) for begin, end in pairwise(self.offsets.tolist())]
        yield from zip(parts, *(slots_of(stack) for stack in stacks), strict=True)

    def check(self, result, expected, scale=1.0):
        assert (result[self.total :] == KEPT).all()
        check(result[: self.total], expected[: self.total], self.dtype, scale)


def padded(stack):
    """Return the stack with gaps of NaN between the tensors of its slots."""
    size, step = stack.shape[1:].numel(), 64 // stack.element_size()
    shape = len(stack), (-(-size // step) + 1) * step
    rows = torch.full(shape, NAN, dtype=stack.dtype, device=DEVICE)
    view = rows[:, :size].unflatten(1, stack.shape[1:])
    view.copy_(stack)
    return view


def slots_of(stacks):
    return [*stacks.homes, *stacks.replicas] if isinstance(stacks, Stacks) else stacks


def empty_like(stacks):
    return Stacks(
        torch.full_like(stacks.homes, KEPT), padded(torch.full_like(stacks.replicas, KEPT))
    )


def check(result, expected, dtype, scale=1.0):
    error = scale * PRECISION[dtype]
    torch.testing.assert_close(result.double(), expected.double(), rtol=error, atol=8 * error)


def reference(case, rows, weights, bias=None, transposed=False):
    width = weights.homes.shape[2 if transposed else 1]
    out = rows.new_full((CAPACITY, width), NAN, dtype=torch.float64)
    for part, weight, shift in case.each(weights, bias or [None] * len(case.counts)):
        weight = weight.double().T if transposed else weight.double()
        out[part] = linear(rows[part].double(), weight, None if shift is None else shift.double())
    return out


@pytest.mark.parametrize("name", SLOTS)
def test_a_network_forward_and_backward(name):
    """All gradients of down(swiglu(up(x))) * scale, with biases."""
    case, F, D = Case(name), 20, 24
    run = case.products
    x, scale, d_out = case.rows(D), case.rows(dtype=SINGLE), case.rows(D)
    weights = [case.stacks(2 * F, D), case.stacks(2 * F), case.stacks(D, F), case.stacks(D)]
    gradients = [empty_like(w) for w in weights]
    up = run.multiply(x, weights[0], weights[1], out=case.empty(2 * F))
    hidden = run.activate(up)
    out = run.multiply(hidden, weights[2], weights[3], scale=scale, out=case.empty(D))
    d_hidden = run.multiply_transposed(d_out, weights[2], out=case.empty(F))
    d_up, hidden, d_scale = run.activate_backward(up, d_hidden, scale)
    run.row_dots(d_out, weights[3], d_scale)
    run.weight_gradients(d_out, hidden, gradients[2], gradients[3], scale=scale)
    run.weight_gradients(d_up, x, gradients[0], gradients[1])
    d_x = run.multiply_transposed(d_up, weights[0], out=case.empty(D))

    leaves = [t.double().requires_grad_() for t in (x, scale)]
    slots = [[t.double().requires_grad_() for t in slots_of(w)] for w in weights]
    expected = torch.zeros(CAPACITY, D, dtype=torch.float64, device=DEVICE)
    parts = []
    for part, *own in case.each(*slots):
        rows = linear(swiglu(linear(leaves[0][part], *own[:2])), *own[2:])
        parts.append(rows * leaves[1][part, None])
    if case.total:
        torch.cat(parts).backward(d_out[: case.total].double())
        expected[: case.total] = torch.cat(parts).detach()
        case.check(d_x, leaves[0].grad, scale=32)
        check(d_scale[: case.total], leaves[1].grad[: case.total], case.dtype, scale=32)
    case.check(out, expected, scale=8)
    for stacks, leaf in zip(gradients, slots, strict=True):
        for gradient, of in zip(slots_of(stacks), leaf, strict=True):
            exact = torch.zeros_like(of) if of.grad is None else of.grad
            check(gradient, exact, case.dtype, scale=32)


@pytest.mark.parametrize("name", SLOTS)
def test_a_product_beside_other_work_has_the_same_bits(name):
    case, launched = Case(name), []
    rows, weights = case.rows(N), case.stacks(N, K)
    alone = case.products.multiply_transposed(rows, weights)

    @contextmanager
    def behind():
        launched.append(True)
        yield

    for _ in range(2):  # the counter of drawn tiles is reset
        out = case.products.multiply_transposed(rows, weights, beside=Beside(1, behind))
        assert torch.equal(out[: case.total], alone[: case.total])
    assert len(launched) == 2


@pytest.mark.parametrize("dtype", [torch.float16, HALF], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (33, 41), (8, 1)], ids=str)
def test_other_types_and_sizes(sizes, dtype):
    height, width = sizes
    case = Case(dtype=dtype)
    rows, weights = case.rows(width), case.stacks(height, width)
    out = case.products.multiply(rows, weights, None, out=case.empty(height))
    case.check(out, reference(case, rows, weights))
    out[case.total :] = NAN
    back = case.products.multiply_transposed(out, weights, out=case.empty(width))
    case.check(back, reference(case, out, weights, transposed=True))
    exact, rounded = case.stacks(height, width, dtype=SINGLE), case.stacks(height, width)
    for into in (exact, rounded):
        case.products.weight_gradients(out, rows, into, None)
    for part, gradient, less in case.each(exact, rounded):
        check(gradient, out[part].double().T @ rows[part].double(), SINGLE, scale=8)
        assert torch.equal(gradient.to(dtype), less)


@pytest.mark.parametrize("of_homes", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", ["mixed", "no replicas", "no homes"])
@pytest.mark.parametrize("apart", [False, True], ids=["rounded", "sums apart"])
def test_gradients_of_homes_in_another_type(name, of_homes, apart):
    """Gradients of homes are rounded once, unless replicas are added to them later."""
    case = Case(name, HALF)
    d_out, rows, scale = case.rows(N), case.rows(K), case.rows(dtype=SINGLE)
    exact, exact_bias = case.stacks(N, K, dtype=SINGLE), case.stacks(N, dtype=SINGLE)
    case.products.weight_gradients(d_out, rows, exact, exact_bias, scale=scale)
    replicated = torch.arange(case.homes, device=DEVICE) % 2 == (0 if apart else 2)
    ends = replicated.int().cumsum(0)
    spans = torch.stack([ends - replicated.int(), ends], dim=1).int()

    def empty(stacks):
        homes, replicas = (torch.full_like(t, NAN) for t in (stacks.homes, stacks.replicas))
        sums = (homes, spans) if apart else (None, None)
        return Stacks(homes.to(of_homes, copy=True), replicas, *sums)

    into, bias = empty(exact), empty(exact_bias)
    case.products.weight_gradients(d_out, rows, into, bias, scale=scale)
    for stacks, expected in ((into, exact), (bias, exact_bias)):
        assert torch.equal(stacks.replicas, expected.replicas)
        assert torch.equal(stacks.homes[~replicated], expected.homes[~replicated].to(of_homes))
        assert stacks.homes[replicated].isnan().all()
        if apart:
            assert torch.equal(stacks.sums[replicated], expected.homes[replicated])
            assert stacks.sums[~replicated].isnan().all()


@pytest.mark.parametrize("name", ["mixed", "few rows"])
@pytest.mark.parametrize(("width", "programs"), [(40, 1), (41, 2), (64, 5), (24, 64)])
def test_other_tiles_and_programs_change_no_bit(width, name, programs):
    """Wide tiles, and low tiles where most slots have few rows."""
    case = Case(name)
    rows, weights, bias = case.rows(K), case.stacks(width, K), case.stacks(width)
    scale, wide_rows, d_rows = case.rows(dtype=SINGLE), case.rows(width), case.rows(K)
    back = case.stacks(K, width)
    results = []
    for products in (case.products, products_for(case.offsets, SINGLE, programs, LOW)):
        into = empty_like(back)
        out = products.multiply(rows, weights, bias, scale=scale, out=case.empty(width))
        turned = products.multiply_transposed(d_rows, back, out=case.empty(width))
        products.weight_gradients(d_rows, wide_rows, into, None)
        results.append([out, turned, into.homes, into.replicas])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@triton.jit
def visit(tiles, visits, total, programs):
    tile, progress = first_tile(tiles, total, programs)
    while tile < total:
        this = tile
        tile, progress = next_tile(tiles, tile, progress, total, programs)
        tl.atomic_add(visits + this, 1)
    finish(tiles, progress, programs)


@pytest.mark.parametrize("grids", [(1,), (2,), (6,), (4, 2), (300,), (130, 2)], ids=str)
@pytest.mark.parametrize("total", [0, 1, 5, 6, 7, 13, 64, 1000])
def test_every_tile_is_computed_once(total, grids):
    """Also if several launches share the tiles, and whichever programs are late."""
    tiles = torch.zeros(6, dtype=torch.int32, device=DEVICE)
    visits = torch.zeros(max(1, total), dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        for programs in grids:
            visit[(programs,)](tiles, visits, total, sum(grids))
    assert visits.tolist() == [3 if total else 0] * max(1, total)


@given(st.lists(st.integers(0, 90) | st.integers(0, 9), max_size=9), st.sampled_from([1, 2, 3, 8]))
@settings(deadline=None, max_examples=20)
def test_rows_of_tiles_are_in_bands_of_one_slot(rows, band):
    """Every row of tiles appears once. Bands divide a slot evenly."""
    height, ends = 4, np.cumsum([0, *rows])
    expected = [
        (slot, int(ends[slot]) + first, count - first)
        for slot, count in enumerate(rows)
        for first in range(0, count, height)
    ]
    tiles = torch.full((6 + 5 * (len(expected) + len(rows)),), -1, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    L = 1 << max(0, len(rows) - 1).bit_length()
    lay_tiles[(max(1, len(rows)),)](
        offsets, tiles, len(rows), L=L, BLOCK_M=height, GROUP_M=band, B=4, num_warps=4
    )
    (number, low, *counters), entries = tiles[:6].tolist(), tiles[6:].view(-1, 5).tolist()
    assert counters == [0, 0, 0, 0]
    few = sum(0 < count <= height // 2 for count in rows)
    assert (number, low) == (len(expected), int(2 * few > len(expected)))
    assert [tuple(row[:3]) for row in entries[:number]] == expected
    assert all(row == [-1] * 5 for row in entries[number:])
    at, heights = 0, {}
    while at < number:
        slot, _, _, first, high = entries[at]
        assert first == at
        assert {(row[0], *row[3:]) for row in entries[at : at + high]} == {(slot, first, high)}
        heights.setdefault(slot, []).append(high)
        at += high
    for high in heights.values():
        assert len(high) == max(1, (sum(high) + band // 2) // band)
        assert max(high) - min(high) <= 1


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_bias_and_scale(dtype):
    """The scale multiplies the rounded result, in its dtype."""
    case = Case(dtype=dtype)
    rows, weights, bias = case.rows(K), case.stacks(N, K), case.stacks(N)
    scale = case.rows(dtype=SINGLE)
    plain = case.products.multiply(rows, weights, bias, out=case.empty(N))
    case.check(plain, reference(case, rows, weights, bias))
    scaled = case.products.multiply(rows, weights, bias, scale=scale, out=case.empty(N))
    expected = plain * scale.to(dtype)[:, None]
    assert torch.equal(scaled[: case.total], expected[: case.total])
    assert (scaled[case.total :] == KEPT).all()


def test_inner_strides():
    """Rows and weights may be parts of wider tensors."""
    case = Case()
    rows, out = case.rows(2 * K)[:, K:], case.empty(N + 3)
    homes, replicas = case.random(case.homes, N, K + 8), case.random(case.replicas, N, K + 8)
    weights = Stacks(homes[..., :K], replicas[..., :K])
    case.products.multiply(rows, weights, None, out=out[:, :N])
    case.check(out[:, :N], reference(case, rows, weights))
    assert (out[:, N:] == KEPT).all()


@pytest.mark.parametrize("dtype", [SINGLE, HALF], ids=str)
def test_bits_of_a_row_do_not_depend_on_its_place(dtype):
    """All rows in another order, in slots of other sizes that hold the same weights."""
    case = Case("full", dtype)
    weight, other, bias = case.random(N, K), case.random(N, K), case.random(N)
    scale, order = case.rows(dtype=SINGLE), torch.randperm(CAPACITY, generator=case.generator)
    rows, up = case.rows(K), case.rows(2 * K)
    results = {}
    for name in ("full", "one slot"):
        there = Case(name, dtype)
        chosen = torch.arange(CAPACITY) if name == "full" else order
        weights = [weight] * (there.homes + there.replicas)
        if name == "full":
            weights[1] = other
        stacks = Stacks(torch.stack(weights[: there.homes]), torch.stack(weights[there.homes :]))
        biases = Stacks(bias.expand(there.homes, N).clone(), bias.expand(there.replicas, N).clone())
        out = there.products.multiply(rows[chosen], stacks, biases, scale=scale[chosen])
        back = there.products.multiply_transposed(out, stacks)
        d_up, hidden, dots = there.products.activate_backward(
            up[chosen], rows[chosen].clone(), scale[chosen]
        )
        there.products.row_dots(out, biases, dots)
        results[name] = [out, back, dots, d_up, hidden]
    own = SLOTS["full"][0][0]  # the row of the slot with other weights
    for before, after in zip(results["full"], results["one slot"], strict=True):
        for place, row in enumerate(order[: sum(SLOTS["one slot"][0])].tolist()):
            if row != own:
                assert torch.equal(before[row], after[place]), (row, place)


def test_profilers_receive_the_shape_of_a_product():
    kernel = SimpleNamespace(name="product")
    rows = matrix(torch.empty(8, 4, dtype=HALF))
    other = matrix(torch.empty(8, 3, dtype=HALF))
    for args in ({"rows": rows, "out": other}, {"rows": other, "d_out": rows}):
        work = work_of_product((1,), kernel, args)
        assert work == {"name": "product_8x4x3", "flops16": 2 * 8 * 4 * 3}


def test_no_slots_and_no_rows():
    offsets = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    none, rows = torch.empty(0, N, K, device=DEVICE), torch.empty(0, K, device=DEVICE)
    products = products_for(offsets)
    out = products.multiply(rows, Stacks(none, none), None)
    products.weight_gradients(out, rows, Stacks(none, none), None)
    assert products.activate(torch.empty(0, 2 * K, device=DEVICE)).shape == (0, K)


# On a GPU: real sizes, and in a graph


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1536, 1024), (2880, 2880)], ids=str)
def test_large_products_in_a_graph(sizes):
    """One graph for all offsets, with the tiles of this GPU."""
    height, width = sizes
    homes, replicas, capacity = 5, 2, 4096

    def random(*shape):
        return torch.randn(*shape, device=DEVICE).to(HALF)

    offsets = torch.zeros(homes + replicas + 1, dtype=torch.int32, device=DEVICE)
    weights = Stacks(random(homes, height, width), padded(random(replicas, height, width)))
    into = Stacks(weights.homes.float(), weights.replicas.float())
    rows, out, back = random(capacity, width), random(capacity, height), random(capacity, width)

    def step():
        products = products_for(offsets, HALF, None, None)
        products.multiply(rows, weights, None, out=out)
        products.multiply_transposed(out, weights, out=back)
        products.weight_gradients(out, rows, into, None)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, capacity + 1, (homes + replicas - 1,), generator=generator).sort()[
            0
        ]
        ends = [min(end, capacity - 100 * seed) for end in [0, *cuts.tolist(), capacity]]
        offsets.copy_(torch.tensor(ends))
        out.fill_(KEPT)
        graph.replay()
        assert (out[ends[-1] :] == KEPT).all()
        for slot, (begin, end) in enumerate(pairwise(ends)):
            weight, part = slots_of(weights)[slot].float(), slice(begin, end)
            near(out[part], rows[part].float() @ weight.T)
            near(back[part], out[part].float() @ weight)
            near(slots_of(into)[slot], out[part].float().T @ rows[part].float())


def near(result, expected):
    error = (result.float() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error < 1e-2, error


# Rows times one factor each


SIZES = [(1, 1), (3, 7), (5, 64), (9, 1500)]


def drawn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels_agree_with_torch(size, dtype, scale_type):
    rows, d_out = (drawn(*size, dtype=dtype, seed=seed) for seed in (0, 1))
    scale = drawn(size[0], dtype=scale_type, seed=2)
    results = []
    for engine in (torch_products, kernels):
        out, d_scale = torch.full_like(rows, torch.nan), torch.full_like(scale, torch.nan)
        engine.scale_rows(rows, scale, out)
        d_rows = engine.scale_rows_backward(d_out, rows, scale, d_scale)
        results.append((out, d_rows, d_scale))
    (out, d_rows, d_scale), (by_kernel, d_rows_by_kernel, d_scale_by_kernel) = results
    assert torch.equal(by_kernel, out)
    assert torch.equal(d_rows_by_kernel, d_rows)
    close = 1e-2 if scale_type == torch.bfloat16 else 1e-5
    torch.testing.assert_close(d_scale_by_kernel, d_scale, rtol=close, atol=close * size[1] ** 0.5)


def test_rows_of_part_of_a_tensor():
    wide, scale = drawn(6, 20), drawn(6)
    out = torch.zeros(8, 10, device=DEVICE)
    kernels.scale_rows(wide[:, 5:15], scale, out[1:7])
    assert torch.equal(out[1:7], wide[:, 5:15] * scale[:, None])
    assert not out[0].any()
    assert not out[7].any()


def test_unsupported_rows_are_left_to_torch():
    for rows in (drawn(4, 6, dtype=torch.float64), drawn(6, 4).T, drawn(0, 6)):
        scale, out = drawn(len(rows), dtype=rows.dtype), torch.empty_like(rows)
        kernels.scale_rows(rows, scale, out)
        assert torch.equal(out, rows * scale[:, None])
        d_scale = torch.empty_like(scale)
        d_rows = kernels.scale_rows_backward(rows, rows, scale, d_scale)
        assert torch.equal(d_rows, rows * scale[:, None])
        torch.testing.assert_close(d_scale, (rows * rows).sum(dim=1))
