"""The same tests for all communicators: threads, and processes over gloo."""

import functools
import random
import time
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist
from ranks import PATIENCE, TRANSPORTS, everywhere, shared_pool

from ultraep.comm import Message
from ultraep.runtime.connect import connect

NAMES = ["int64", "float32", "float64", "bfloat16", "float8_e4m3fn", "uint16", "uint8", "bool"]
DTYPES = [getattr(torch, name) for name in NAMES]
WIDE = 8 << 20  # bytes


@pytest.fixture(params=TRANSPORTS)
def run(request):
    return functools.partial(everywhere, request.param)


def noise(shape, dtype, *key):
    """The same bytes for the same key, on every rank; infinities and NaNs among them."""
    dice = torch.Generator().manual_seed(sum(part * 1009**place for place, part in enumerate(key)))
    highest = 2 if dtype == torch.bool else 256
    data = torch.randint(highest, (*shape, dtype.itemsize), dtype=torch.uint8, generator=dice)
    return data.view(dtype).reshape(shape)


def check(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (got, expected)))


# Each verb with its expected result. Inputs are overwritten as soon as the verb returns.


def gathering(comm, shape, dtype, key):
    mine = noise(shape, dtype, key, comm.rank)
    got = comm.all_gather(mine)
    mine.zero_()
    return got, torch.stack([noise(shape, dtype, key, peer) for peer in range(comm.size)])


def swapping(comm, counts_RR, shape, dtype, key):
    """`counts_RR[source][target]` rows each."""

    def rows_of(source):
        return noise((sum(counts_RR[source]), *shape), dtype, key, source)

    def part(source):
        start = list(accumulate(counts_RR[source], initial=0))
        return rows_of(source)[start[comm.rank] : start[comm.rank + 1]]

    mine = rows_of(comm.rank)
    arriving = [counts[comm.rank] for counts in counts_RR]
    got = comm.all_to_all(mine, counts_RR[comm.rank], arriving)
    mine.zero_()
    return got, torch.cat([part(source) for source in range(comm.size)])


def exchanging(comm, messages, dtype, key):
    """`messages` are (source, target, shape), in order."""
    known = [(s, t, noise(shape, dtype, key, n)) for n, (s, t, shape) in enumerate(messages)]
    sends = [Message(target, data.clone()) for source, target, data in known if source == comm.rank]
    expected = [(source, data) for source, target, data in known if target == comm.rank]
    receives = [Message(source, torch.zeros_like(data)) for source, data in expected]
    comm.exchange(sends, receives)
    for message in sends:
        message.tensor.zero_()
    return [(m.tensor, data) for m, (_, data) in zip(receives, expected, strict=True)]


def all_verbs(comm):
    size = comm.size
    ring = [(rank, (rank + 1) % size, (3, 2)) for rank in range(size)]
    counts_RR = [[(source + 2 * target) % 4 for target in range(size)] for source in range(size)]
    for key, dtype in enumerate(DTYPES):
        for shape in ((), (5,), (3, 4)):
            check(*gathering(comm, shape, dtype, key))
        for shape in ((), (3,), (2, 2)):
            check(*swapping(comm, counts_RR, shape, dtype, key))
        for got, expected in exchanging(comm, ring, dtype, key):
            check(got, expected)
    value = {"rank": comm.rank, "text": "x" * 1000 * comm.rank}
    assert comm.gather_objects(value) == [{"rank": r, "text": "x" * 1000 * r} for r in range(size)]
    return comm.rank, comm.size


def almost_nothing(comm):
    size = comm.size
    nothing = [[0] * size for _ in range(size)]
    one = [[7 if (source, target) == (0, size - 1) else 0 for target in range(size)]
           for source in range(size)]  # fmt: skip
    for shape in ((), (3,), (0,), (2, 0)):
        check(*gathering(comm, (0, *shape), torch.float32, 1))
        check(*swapping(comm, nothing, shape, torch.bfloat16, 1))
        check(*swapping(comm, one, shape, torch.bfloat16, 2))
    comm.exchange([], [])
    for messages in ([(0, size - 1, (4,))], [(0, size - 1, (0, 3)), (0, size - 1, (2,))]):
        for got, expected in exchanging(comm, messages, torch.int64, 3):
            check(got, expected)
    check(*gathering(comm, (2,), torch.int64, 4))


def every_verb(comm):
    almost_nothing(comm)
    return all_verbs(comm)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_every_verb_and_dtype(run, size):
    assert run(size, every_verb) == [(rank, size) for rank in range(size)]


def big_messages(comm):
    both_ways = [(0, 1, (WIDE,)), (1, 0, (WIDE,)), (0, 1, (WIDE + 5,)), (1, 0, (WIDE // 2,))]
    for got, expected in exchanging(comm, both_ways, torch.uint8, 1):
        check(got, expected)
    check(*swapping(comm, [[10, 2048], [2048, 0]], (1024,), torch.float32, 2))


def strided(comm):
    other = 1 - comm.rank
    data = noise((6, 4), torch.float32, 1)
    table = torch.zeros(4, 12)
    comm.exchange([Message(other, data.t())], [Message(other, table[:, ::2])])
    check(table[:, ::2], data.t())
    assert not table[:, 1::2].any()
    check(comm.all_gather(data.t())[other], data.t())
    check(comm.all_to_all(data.t(), [2, 2], [2, 2])[:2], data.t()[2 * comm.rank :][:2])


def with_gradient(comm):
    leaf = torch.ones(4, 2, requires_grad=True)
    assert not comm.all_gather(leaf * 2).requires_grad
    assert not comm.all_to_all(leaf * 2, [2, 2], [2, 2]).requires_grad


def both_modes(comm):
    for without_gradients in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with without_gradients():
            all_verbs(comm)
        all_verbs(comm)


def special_tensors(comm):
    big_messages(comm)
    strided(comm)
    with_gradient(comm)
    both_modes(comm)


def test_big_strided_and_differentiable_tensors(run):
    run(2, special_tensors)


def random_verbs(comm, seed):
    dice, own_dice = random.Random(seed), random.Random(100 * seed + comm.rank)
    ranks = range(comm.size)
    slow = dice.choice([*ranks, None])
    kept = []
    for step in range(25):
        if own_dice.random() < (0.8 if comm.rank == slow else 0.1):
            time.sleep(own_dice.random() * 0.006)
        dtype, width = dice.choice(DTYPES), dice.choice([1, 3, 500])
        verb = dice.randrange(3)
        if verb == 0:
            kept.append(gathering(comm, (dice.randrange(40), width), dtype, step))
        elif verb == 1:
            counts_RR = [[dice.choice([0, 1, 60]) for _ in ranks] for _ in ranks]
            kept.append(swapping(comm, counts_RR, (width,), dtype, step))
        else:
            ends = [(dice.choice(ranks), dice.choice(ranks)) for _ in range(dice.randrange(9))]
            messages = [(s, t, (dice.randrange(90), width)) for s, t in ends]
            kept.extend(exchanging(comm, messages, dtype, step))
    for got, expected in kept:
        check(got, expected)


@pytest.mark.parametrize(("size", "seed"), [(3, 2), (4, 3)])
def test_random_verbs_with_delays(run, size, seed):
    run(size, random_verbs, seed)


def several_groups(rank, world):
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [3, 1], [0, 1, 2])]
    mine = [group for group in groups if dist.get_rank(group) >= 0]
    comms = [connect(group, timeout=PATIENCE) for group in [world, world, *mine]]
    for turn in range(3):
        for comm in comms if turn % 2 else reversed(comms):
            all_verbs(comm)
    for comm in comms:
        comm.close()
    return [comm.size for comm in comms]


def test_several_groups_in_one_process():
    sizes = shared_pool().run(4, several_groups)
    assert sizes == [[4, 4, 2, 3], [4, 4, 2, 3], [4, 4, 2, 3], [4, 4, 2]]
