"""The networks of all slots on the GPU; without one, the kernels are interpreted."""

from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl
from guard import watched
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ultraep.backends.triton.blocks import Blocks, square_band, table_for
from ultraep.backends.triton.device import default_device, interpreted, launching
from ultraep.backends.triton.grouped import Grouped
from ultraep.backends.triton.kernels.grouped import work_of_product
from ultraep.backends.triton.kernels.tiles import lay_tiles
from ultraep.ops.activations import swiglu
from ultraep.ops.products import Beside, Stacks

DEVICE = default_device()
CAPACITY, N, K = 40, 40, 24
SMALL = dict.fromkeys(table_for("cuda", (8, 0)), Blocks(16, 16, 16, stages=2, band=2))
LOW = dict.fromkeys(SMALL, Blocks(16, 32, 16, stages=2, band=2, half=True))
SLOTS = {  # rows of the home slots, and of the spare ones
    "mixed": ([5, 0, 17], [9, 3]),
    "full": ([20, 1], [19]),
    "no rows": ([0, 0], [0]),
    "one slot": ([0, 0, 37], [0]),
    "one copy": ([0], [0, 33]),
    "no copies": ([16, 3, 2], []),
    "no homes": ([], [3, 0, 20]),
    "few rows": ([5, 0, 8], [3, 1]),
}
NAN, KEPT = float("nan"), 7.0
PRECISION = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def watch(monkeypatch):
    """Interpreted kernels touch nothing but their tensors, and compute as a GPU does."""
    if interpreted():
        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    with watched() if interpreted() else nullcontext(), launching(DEVICE):
        yield


def dot(self, left, right, added, *_):
    """A product of tiles, for Triton's interpreter: its own one reads bfloat16 as integers.

    Every element is summed by itself, in one order, as on a GPU; a library for the CPU need not.
    """
    left, right, total = numbers(left), numbers(right), added.data.copy()
    for k in range(left.shape[1]):
        total += left[:, k, None] * right[None, k]
    return TensorHandle(total, added.dtype.scalar)


def numbers(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


class Case:
    """Rows of some slots; behind them, numbers that nobody may read."""

    def __init__(self, name="mixed", dtype=torch.float32, seed=0):
        homes, copies = SLOTS[name]
        self.counts, self.homes, self.copies = homes + copies, len(homes), len(copies)
        self.total, self.dtype = sum(self.counts), dtype
        self.draw = torch.Generator().manual_seed(seed)
        ends = torch.tensor([0, *self.counts]).cumsum(0)
        self.grouped = Grouped(ends.to(DEVICE, torch.int32), programs=2, table=SMALL)

    def random(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.draw).to(DEVICE, dtype or self.dtype)

    def rows(self, *width, dtype=None):
        drawn = self.random(CAPACITY, *width, dtype=dtype)
        drawn[self.total :] = NAN
        return drawn

    def room(self, *width, dtype=None):
        return torch.full((CAPACITY, *width), KEPT, dtype=dtype or self.dtype, device=DEVICE)

    def stacks(self, *shape, dtype=None):
        return Stacks(
            self.random(self.homes, *shape, dtype=dtype),
            padded(self.random(self.copies, *shape, dtype=dtype)),
        )

    def parts(self):
        """The rows of every slot."""
        begin = 0
        for count in self.counts:
            yield slice(begin, begin + count)
            begin += count

    def each(self, *stacks):
        """Rows of every slot, and what the stacks hold for it."""
        yield from zip(self.parts(), *(slots_of(stack) for stack in stacks), strict=True)

    def check(self, found, wanted, scale=1.0):
        assert (found[self.total :] == KEPT).all()
        check(found[: self.total], wanted[: self.total], self.dtype, scale)


def padded(stack):
    """The same numbers in rows of bytes, some of which belong to something else."""
    size, step = stack.shape[1:].numel(), 64 // stack.element_size()
    shape = len(stack), (-(-size // step) + 1) * step
    rows = torch.full(shape, NAN, dtype=stack.dtype, device=DEVICE)
    view = rows[:, :size].unflatten(1, stack.shape[1:])
    view.copy_(stack)
    return view


def slots_of(stacks):
    return [*stacks.homes, *stacks.copies] if isinstance(stacks, Stacks) else stacks


def transposed(stacks):
    return Stacks(
        stacks.homes.mT.clone(memory_format=torch.contiguous_format), padded(stacks.copies.mT)
    )


def check(found, wanted, dtype, scale=1.0):
    error = scale * PRECISION[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=error, atol=8 * error)


def expected(case, rows, weights, bias=None):
    out = rows.new_full((CAPACITY, weights.homes.shape[1]), NAN, dtype=torch.float64)
    for part, weight, shift in case.each(weights, bias or [None] * len(case.counts)):
        shift = None if shift is None else shift.double()
        out[part] = linear(rows[part].double(), weight.double(), shift)
    return out


@pytest.mark.parametrize("name", SLOTS)
def test_multiply(name):
    case = Case(name)
    rows, weights, out = case.rows(K), case.stacks(N, K), case.room(N)
    case.grouped.multiply(rows, weights, out)
    case.check(out, expected(case, rows, weights))


@pytest.mark.parametrize("name", SLOTS)
def test_multiply_transposed(name):
    case = Case(name)
    rows, weights, out = case.rows(N), case.stacks(N, K), case.room(K)
    case.grouped.multiply_transposed(rows, weights, out)
    turned = transposed(weights)
    case.check(out, expected(case, rows, turned))


@pytest.mark.parametrize("name", SLOTS)
def test_a_product_beside_other_work_has_the_same_bits(name):
    case, launched = Case(name), []
    rows, weights, alone, out = case.rows(N), case.stacks(N, K), case.room(K), case.room(K)
    case.grouped.multiply_transposed(rows, weights, alone)

    @contextmanager
    def behind():
        launched.append(True)
        yield

    for _ in range(2):  # tiles are drawn anew
        out.fill_(torch.nan)
        case.grouped.multiply_transposed(rows, weights, out, beside=Beside(1, behind))
        there = slice(0, int(case.grouped.offsets[-1]))
        assert torch.equal(out[there], alone[there])
    assert len(launched) == 2


@pytest.mark.parametrize("name", SLOTS)
def test_weight_gradients(name):
    case = Case(name)
    d_out, rows, into, bias = case.rows(N), case.rows(K), case.stacks(N, K), case.stacks(N)
    case.grouped.weight_gradients(d_out, rows, into, bias=bias)
    for part, found, sums in case.each(into, bias):
        check(found, d_out[part].double().T @ rows[part].double(), torch.float32)
        check(sums, d_out[part].double().sum(0), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(64, 64), (33, 41), (8, 1)], ids=str)
def test_other_types_and_sizes(sizes, dtype):
    height, width = sizes
    case = Case(dtype=dtype)
    rows, weights, out = case.rows(width), case.stacks(height, width), case.room(height)
    case.grouped.multiply(rows, weights, out)
    wanted = expected(case, rows, weights)
    case.check(out, wanted)
    back = case.room(width)
    out[case.total :] = NAN
    case.grouped.multiply_transposed(out, weights, back)
    turned = transposed(weights)
    case.check(back, expected(case, out, turned))
    into = case.stacks(height, width, dtype=torch.float32)
    case.grouped.weight_gradients(out, rows, into)
    rounded = case.stacks(height, width)
    case.grouped.weight_gradients(out, rows, rounded)
    for part, found, less in case.each(into, rounded):
        check(found, out[part].double().T @ rows[part].double(), torch.float32, scale=8)
        assert torch.equal(found.to(dtype), less)


@pytest.mark.parametrize("name", ["mixed", "no copies", "no homes"])
def test_gradients_of_homes_in_another_type(name):
    """Those of homes are rounded once; those of copies keep the type that they are added in."""
    case, single = Case(name, torch.bfloat16), torch.float32
    d_out, rows, scale = case.rows(N), case.rows(K), case.rows(dtype=single)
    wide, wide_bias = case.stacks(N, K, dtype=single), case.stacks(N, dtype=single)
    into = Stacks(case.stacks(N, K).homes, case.stacks(N, K, dtype=single).copies)
    bias = Stacks(case.stacks(N).homes, case.stacks(N, dtype=single).copies)
    case.grouped.weight_gradients(d_out, rows, wide, bias=wide_bias, scale=scale)
    case.grouped.weight_gradients(d_out, rows, into, bias=bias, scale=scale)
    for found, exact in ((into, wide), (bias, wide_bias)):
        assert torch.equal(found.homes, exact.homes.bfloat16())
        assert torch.equal(found.copies, exact.copies)


@pytest.mark.parametrize("of_homes", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["mixed", "no copies"])
def test_gradients_to_which_others_are_added_are_not_rounded(name, of_homes):
    case, single = Case(name, torch.bfloat16), torch.float32
    d_out, rows, scale = case.rows(N), case.rows(K), case.rows(dtype=single)
    wide, wide_bias = case.stacks(N, K, dtype=single), case.stacks(N, dtype=single)
    case.grouped.weight_gradients(d_out, rows, wide, bias=wide_bias, scale=scale)
    homes = len(wide.homes)
    copied = torch.arange(homes, device=DEVICE) % 2 == 0
    ends = copied.int().cumsum(0)
    spans = torch.stack([ends - copied.int(), ends], dim=1).int()

    def apart(exact):
        empty = torch.full_like(exact.homes, NAN)
        return Stacks(
            empty.to(of_homes, copy=True), torch.full_like(exact.copies, NAN), empty, spans
        )

    into, bias = apart(wide), apart(wide_bias)
    case.grouped.weight_gradients(d_out, rows, into, bias=bias, scale=scale)
    for found, exact in ((into, wide), (bias, wide_bias)):
        assert torch.equal(found.copies, exact.copies)
        assert torch.equal(found.sums[copied], exact.homes[copied])
        assert found.sums[~copied].isnan().all()
        assert torch.equal(found.homes[~copied], exact.homes[~copied].to(of_homes))
        assert found.homes[copied].isnan().all()


@pytest.mark.parametrize("name", ["mixed", "few rows"])
@pytest.mark.parametrize("width", [40, 41, 64, 24])
def test_other_tiles_change_no_bit(width, name):
    """Wide ones, and low ones where most slots have few rows."""
    case = Case(name)
    low = Grouped(case.grouped.offsets, programs=2, table=LOW)
    rows, weights, bias = case.rows(K), case.stacks(width, K), case.stacks(width)
    scale, wide_rows, d_rows = case.rows(dtype=torch.float32), case.rows(width), case.rows(K)
    back = case.stacks(K, width)
    found = []
    for grouped in (case.grouped, low):
        out, turned, into = case.room(width), case.room(width), empty_like(back)
        grouped.multiply(rows, weights, out, bias=bias, scale=scale)
        grouped.multiply_transposed(d_rows, back, turned)
        grouped.weight_gradients(d_rows, wide_rows, into)
        found.append([out, turned, into.homes, into.copies])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@given(
    st.lists(st.integers(0, 90) | st.integers(0, 9), max_size=9),
    st.sampled_from([1, 2, 3, 8]),
)
@settings(deadline=None, max_examples=20)
def test_rows_of_tiles_are_in_bands_of_one_slot(rows, band):
    """All are there once. Bands divide a slot evenly, and every row of tiles knows its band."""
    height, ends = 4, np.cumsum([0, *rows])
    wanted = [
        (slot, int(ends[slot]) + first, count - first)
        for slot, count in enumerate(rows)
        for first in range(0, count, height)
    ]
    laid = torch.full((5 * (len(wanted) + len(rows) + 1),), -1, dtype=torch.int32, device=DEVICE)
    offsets = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    L = 1 << max(0, len(rows) - 1).bit_length()
    lay_tiles[(max(1, len(rows)),)](
        offsets, laid, len(rows), L=L, BLOCK_M=height, GROUP_M=band, B=4, num_warps=4
    )
    (number, low, *_), *found = laid.view(-1, 5).tolist()
    few = sum(0 < count <= height // 2 for count in rows)
    assert (number, low) == (len(wanted), int(2 * few > len(wanted)))
    assert [tuple(row[:3]) for row in found[:number]] == wanted
    assert all(row == [-1] * 5 for row in found[number:])
    at, heights = 0, {}
    while at < number:
        slot, _, _, first, high = found[at]
        assert first == at
        assert {(row[0], *row[3:]) for row in found[at : at + high]} == {(slot, first, high)}
        heights.setdefault(slot, []).append(high)
        at += high
    for high in heights.values():
        assert len(high) == max(1, (sum(high) + band // 2) // band)
        assert max(high) - min(high) <= 1


def test_bands_are_as_high_as_programs_can_share():
    blocks = Blocks(128, 256)
    assert [square_band(programs, blocks) for programs in (1, 16, 132)] == [1, 6, 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_and_scale(dtype):
    """As without a scale, then scaled in the type of the result."""
    case = Case(dtype=dtype)
    rows, weights, bias = case.rows(K), case.stacks(N, K), case.stacks(N)
    scale = case.rows(dtype=torch.float32)
    plain, scaled = case.room(N), case.room(N)
    case.grouped.multiply(rows, weights, plain, bias=bias)
    case.check(plain, expected(case, rows, weights, bias))
    case.grouped.multiply(rows, weights, scaled, bias=bias, scale=scale)
    wanted = plain * scale.to(dtype)[:, None]
    assert torch.equal(scaled[: case.total], wanted[: case.total])
    assert (scaled[case.total :] == KEPT).all()


def test_inner_strides():
    """Of rows and weights that are parts of wider ones."""
    case = Case()
    rows, out = case.rows(2 * K)[:, K:], case.room(N + 3)
    homes, copies = case.random(case.homes, N, K + 8), case.random(case.copies, N, K + 8)
    weights = Stacks(homes[..., :K], copies[..., :K])
    case.grouped.multiply(rows, weights, out[:, :N])
    case.check(out[:, :N], expected(case, rows, weights))
    assert (out[:, N:] == KEPT).all()
    with pytest.raises(AssertionError):
        case.grouped.multiply(
            rows, Stacks(homes[..., :K], copies[..., :K].contiguous()), out[:, :N]
        )


@pytest.mark.parametrize("programs", [1, 5, 64])
def test_any_number_of_programs(programs):
    case = Case()
    rows, weights, out = case.rows(K), case.stacks(N, K), case.room(N)
    into, wanted = case.stacks(N, K), case.stacks(N, K)
    case.grouped.multiply(rows, weights, out)
    out[case.total :] = NAN
    case.grouped.weight_gradients(out, rows, wanted)
    again = Grouped(case.grouped.offsets, programs=programs, table=SMALL)
    found = case.room(N)
    again.multiply(rows, weights, found)
    again.weight_gradients(out, rows, into)
    assert torch.equal(found[: case.total], out[: case.total])
    assert torch.equal(into.homes, wanted.homes)
    assert torch.equal(into.copies, wanted.copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_do_not_depend_on_its_place(dtype):
    """All rows in another order, in slots of other sizes that hold the same weights."""
    case = Case("full", dtype)
    weight, other, bias = case.random(N, K), case.random(N, K), case.random(N)
    scale, order = case.rows(dtype=torch.float32), torch.randperm(CAPACITY, generator=case.draw)
    rows, up = case.rows(K), case.rows(2 * K)
    moved = {}
    for name in ("full", "one slot"):
        there = Case(name, dtype)
        chosen = torch.arange(CAPACITY) if name == "full" else order
        weights = [weight] * (there.homes + there.copies)
        if name == "full":
            weights[1] = other
        stacks = Stacks(torch.stack(weights[: there.homes]), torch.stack(weights[there.homes :]))
        biases = Stacks(bias.expand(there.homes, N).clone(), bias.expand(there.copies, N).clone())
        out, back, dots = there.room(N), there.room(K), there.room(dtype=torch.float32)
        hidden, d_up = there.room(K), there.room(2 * K)
        there.grouped.multiply(rows[chosen], stacks, out, bias=biases, scale=scale[chosen])
        there.grouped.multiply_transposed(out, stacks, back)
        there.grouped.swiglu_backward(
            up[chosen], rows[chosen], d_up, hidden=hidden, scale=scale[chosen], d_scale=dots
        )
        there.grouped.row_dots(out, biases, dots)
        moved[name] = [out, back, dots, d_up, hidden]
    own = SLOTS["full"][0][0]  # of the slot between them, which has other weights
    for before, after in zip(moved["full"], moved["one slot"], strict=True):
        for place, row in enumerate(order[: sum(SLOTS["one slot"][0])].tolist()):
            if row != own:
                assert torch.equal(before[row], after[place]), (row, place)


@pytest.mark.parametrize("name", SLOTS)
def test_a_network_forward_and_backward(name):
    """All gradients of down(swiglu(up(x))) * scale, with biases."""
    case, F, D = Case(name), 20, 24
    run = case.grouped
    x, scale, d_out = case.rows(D), case.rows(dtype=torch.float32), case.rows(D)
    weights = [case.stacks(2 * F, D), case.stacks(2 * F), case.stacks(D, F), case.stacks(D)]
    up, hidden, out = case.room(2 * F), case.room(F), case.room(D)
    run.multiply(x, weights[0], up, bias=weights[1])
    run.swiglu(up, hidden)
    run.multiply(hidden, weights[2], out, bias=weights[3], scale=scale)
    d_hidden, d_up, d_x = case.room(F), case.room(2 * F), case.room(D)
    d_scale, gradients = case.room(dtype=torch.float32), [empty_like(w) for w in weights]
    run.multiply_transposed(d_out, weights[2], d_hidden)
    run.swiglu_backward(up, d_hidden, d_up, hidden=d_hidden, scale=scale, d_scale=d_scale)
    run.row_dots(d_out, weights[3], d_scale)
    run.weight_gradients(d_out, d_hidden, gradients[2], bias=gradients[3], scale=scale)
    run.weight_gradients(d_up, x, gradients[0], bias=gradients[1])
    run.multiply_transposed(d_up, weights[0], d_x)

    leaves = [t.double().requires_grad_() for t in (x, scale)]
    slots = [[t.double().requires_grad_() for t in slots_of(w)] for w in weights]
    wanted = torch.zeros(CAPACITY, D, dtype=torch.float64, device=DEVICE)
    parts = []
    for part, *own in case.each(*slots):
        rows = linear(swiglu(linear(leaves[0][part], *own[:2])), *own[2:])
        parts.append(rows * leaves[1][part, None])
    if case.total:
        torch.cat(parts).backward(d_out[: case.total].double())
        wanted[: case.total] = torch.cat(parts).detach()
    case.check(out, wanted, scale=8)
    for found, leaf in zip((d_x, d_scale), leaves, strict=True):
        if case.total:
            case.check(found, leaf.grad, scale=32)
    for found, leaf in zip(gradients, slots, strict=True):
        for one, of in zip(slots_of(found), leaf, strict=True):
            check(one, torch.zeros_like(of) if of.grad is None else of.grad, case.dtype, scale=32)


def empty_like(stacks):
    return Stacks(torch.full_like(stacks.homes, KEPT), padded(torch.full_like(stacks.copies, KEPT)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_swiglu_of_other_types(dtype):
    case, F = Case(dtype=dtype), 33
    up, d_hidden, hidden, d_up = case.rows(2 * F), case.rows(F), case.room(F), case.room(2 * F)
    case.grouped.swiglu(up, hidden)
    leaf = up[: case.total].double().requires_grad_()
    wanted = swiglu(leaf)
    wanted.backward(d_hidden[: case.total].double())
    case.check(hidden, wanted.detach())
    case.grouped.swiglu_backward(up, d_hidden, d_up)
    case.check(d_up, leaf.grad)


def test_profilers_are_told_the_shape_of_a_product():
    rows = torch.empty(8, 4, dtype=torch.bfloat16)
    for inner in ("depth", "height"):
        args = {"rows_ptr": rows, inner: 4, "width": 3}
        work = work_of_product((1,), SimpleNamespace(name="product"), args)
        assert work == {"name": "product_8x4x3", "flops16": 2 * 8 * 4 * 3}


def test_nobody_reads_what_is_not_there():
    """No offsets at all, no room at all."""
    offsets = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    none, rows = torch.empty(0, N, K, device=DEVICE), torch.empty(0, K, device=DEVICE)
    out = torch.empty(0, N, device=DEVICE)
    grouped = Grouped(offsets, table=SMALL)
    grouped.multiply(rows, Stacks(none, none), out)
    grouped.weight_gradients(out, rows, Stacks(none, none))
    grouped.swiglu(torch.empty(0, 2 * K, device=DEVICE), rows)


def test_wrong_shapes_are_refused():
    case = Case()
    rows, weights, out = case.rows(K), case.stacks(N, K), case.room(N)
    with pytest.raises(AssertionError):
        case.grouped.multiply(rows, weights, case.room(N + 1))
    with pytest.raises(AssertionError):
        case.grouped.multiply(rows, Stacks(weights.homes, weights.homes), out)
    with pytest.raises(AssertionError):
        case.grouped.multiply(rows.half(), weights, out)
    with pytest.raises(AssertionError):
        case.grouped.multiply(rows, weights, out, scale=case.rows(dtype=torch.float16))
    with pytest.raises(AssertionError):
        case.grouped.multiply(rows, Stacks(weights.homes, weights.copies.half()), out)
    with pytest.raises(AssertionError):
        case.grouped.swiglu(out, rows)


# On a GPU: as large as they are used, and in a graph


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", [(1536, 1024), (2880, 2880)], ids=str)
def test_large_products_in_a_graph(sizes):
    """One graph for whatever the offsets say, with blocks as in use."""
    height, width = sizes
    homes, copies, capacity, dtype = 5, 2, 4096, torch.bfloat16

    def random(*shape):
        return torch.randn(*shape, device=DEVICE).to(dtype)

    offsets = torch.zeros(homes + copies + 1, dtype=torch.int32, device=DEVICE)
    weights = Stacks(random(homes, height, width), padded(random(copies, height, width)))
    into = Stacks(weights.homes.float(), weights.copies.float())
    rows, out, back = random(capacity, width), random(capacity, height), random(capacity, width)

    def step():
        grouped = Grouped(offsets)
        grouped.multiply(rows, weights, out)
        grouped.multiply_transposed(out, weights, back)
        grouped.weight_gradients(out, rows, into)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        cuts = torch.randint(0, capacity + 1, (homes + copies - 1,), generator=draw).sort()[0]
        ends = [0, *cuts.tolist(), capacity - 100 * seed]
        ends = [min(end, capacity - 100 * seed) for end in ends]
        offsets.copy_(torch.tensor(ends))
        out.fill_(KEPT)
        graph.replay()
        assert (out[ends[-1] :] == KEPT).all()
        for slot, (begin, end) in enumerate(pairwise(ends)):
            weight, part = slots_of(weights)[slot].float(), slice(begin, end)
            near(out[part], rows[part].float() @ weight.T)
            near(back[part], out[part].float() @ weight)
            near(slots_of(into)[slot], out[part].float().T @ rows[part].float())


def near(found, wanted):
    error = (found.float() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert error < 1e-2, error
