"""Dispatchers that deliver the wrong rows, and libraries that are not known, are refused."""

import sys
from dataclasses import replace

import pytest
import torch
from dense import Example, assert_same_tensors, on_every_rank
from stand_ins import Buffer, ElasticBuffer, HybridEPBuffer, library
from test_dispatchers import NAMES, dispatcher_of, one_pass, selective

from ultraep import Balancer
from ultraep.dispatchers.deepep import DeepEP, DeepEPBuffer
from ultraep.dispatchers.hybridep import HybridEP, ranks_of_domain
from ultraep.errors import (
    BackendUnavailable,
    CommunicationError,
    ConfigError,
    LoadError,
    PlanMismatch,
)
from ultraep.microbatch import Layer
from ultraep.runtime.local import LocalGroup

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = Example([8, 6], experts=4)


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    library(monkeypatch, "deep_ep", "2.1.0")


class Broken:
    def __init__(self, comm, change=None, change_sums=None):
        self.inner, self.rank = dispatcher_of("DeepEP")(comm), comm.rank
        self.change, self.change_sums = change, change_sums

    def dispatch(self, tokens, gates, routes):
        received = self.inner.dispatch(tokens, gates, routes)
        return self.change(received) if self.change and self.rank == 1 else received

    def combine(self, outputs, received):
        y = self.inner.combine(outputs, received)
        return self.change_sums(y) if self.change_sums and self.rank == 1 else y


def changed(**fields):
    return lambda received: replace(received, **{k: f(received) for k, f in fields.items()})


def swapped_slots(received):
    """Exchange the first and the last row."""
    rows = received.rows.clone()
    rows[[0, -1]] = rows[[-1, 0]]
    return rows


CHANGES = {
    "loses a row": (
        changed(counts=lambda r: [r.counts[0] - 1, *r.counts[1:]]),
        r"Broken delivered \d+ rows to rank 1, the plan says \d+; the first difference is slot 0: "
        r"\d+, planned \d+",
    ),
    "invents a row": (
        changed(counts=lambda r: [*r.counts[:-1], r.counts[-1] + 1]),
        r"Broken delivered \d+ rows to rank 1, the plan says \d+; the first difference is slot 3",
    ),
    "counts on the device": (
        changed(counts=lambda r: torch.tensor(r.counts) + 1),
        r"Broken delivered \d+ rows to rank 1, the plan says \d+",
    ),
    "counts experts, not slots": (
        changed(counts=lambda r: r.counts[:2]),
        r"Broken must count the rows of 4 slots, got 2 counts",
    ),
    "tensor too short": (
        changed(rows=lambda r: r.rows[:-1], gates=lambda r: r.gates[:-1]),
        r"Broken counted \d+ rows on rank 1, but delivered \d+",
    ),
    "no gates": (
        changed(gates=lambda r: r.gates[:0]),
        r"Broken must deliver a gate for each of \d+ rows, got \[0\]",
    ),
    "another dtype": (
        changed(rows=lambda r: r.rows.float()),
        r"Broken must deliver rows \[A, 16\] torch.float64, got \[\d+, 16\] torch.float32",
    ),
    "another order": (
        changed(rows=swapped_slots),
        r"Broken returned wrong sums for \d+ of 16 tokens of rank \d, first for token \d+, in a ",
    ),
    "a row twice": (
        changed(rows=lambda r: r.rows.index_copy(0, torch.tensor([0]), r.rows[1:2])),
        r"Broken returned wrong sums for \d of 16 tokens of rank \d, first for token \d+, in a ",
    ),
}
SUMS = {
    "the sums of other tokens": (
        lambda y: y.flip(0),
        r"Broken returned wrong sums for \d+ of 16 tokens of rank 1, first for token \d, in a ",
    ),
    "the handle of another microbatch": (
        lambda y: y[:-1],
        r"Broken must combine rows to \[16, 16\] torch.float64, one for each token of this "
        r"microbatch, got \[15, 16\] torch.float64: is its handle from another microbatch\?",
    ),
}


@pytest.mark.parametrize("name", [*CHANGES, *SUMS])
def test_wrong_rows_or_sums_are_refused_in_the_first_step(name):
    """On all ranks, before any expert runs."""
    change, message = (CHANGES | SUMS)[name]

    def refused(layer, x, gradient):
        plan_only(layer, x)
        layer.experts.forward = None  # experts must not run
        with pytest.raises(CommunicationError, match=message):
            layer(x)
        return True

    def make(comm):
        return Broken(comm, **{"change_sums" if name in SUMS else "change": change})

    assert on_every_rank(EXAMPLE, refused, slots=2, dispatcher=make) == [True, True]


def plan_only(layer, x):
    """A microbatch without rows, which needs no dispatcher."""
    microbatch = layer.balancer.begin(planned_layer(layer), layer.router(x).ids)
    microbatch.count()
    microbatch.plan()
    assert (microbatch.reroute().slots >= 0).all()


def test_counts_are_compared_in_every_step():
    """A dispatcher that loses rows later than in the first step."""

    def second_step(layer, x, gradient):
        one_pass(layer, x, gradient)
        lose = changed(counts=lambda r: [count - 1 for count in r.counts])
        dispatcher = layer.balancer.settings.dispatcher
        dispatcher.change, dispatcher.rank = lose, 1  # on all ranks
        with pytest.raises(CommunicationError, match=r"Broken delivered \d+ rows to rank"):
            layer(x)
        return True

    assert on_every_rank(EXAMPLE, second_step, slots=2, dispatcher=Broken) == [True, True]


def test_outputs_of_another_microbatch():
    def mixed(layer, x, gradient):
        balancer, (ids, gates, _) = layer.balancer, layer.router(x)
        microbatches = []
        for count in (len(x), len(x) - 2):
            microbatch = balancer.begin(planned_layer(layer), ids[:count], gates[:count], x[:count])
            microbatch.count()
            microbatch.plan()
            with microbatch.replicate() as replicas:
                microbatch.reroute()
                rows = microbatch.dispatch()
                microbatches.append((microbatch, layer.experts(rows, replicas)))
        (first, own), (second, other) = microbatches
        with pytest.raises(ConfigError, match=r"each of the \d+ rows of this microbatch, got \d+"):
            first.combine(other)
        first.combine(own)
        with pytest.raises(ConfigError, match=r"call dispatch\(\) before combine\(\)"):
            first.combine(own)
        second.combine(other)

    options = {"slots": 2, "in_flight": 2}
    on_every_rank(EXAMPLE, mixed, dispatcher=dispatcher_of("DeepEP"), **options)


def planned_layer(layer):
    return Layer(layer.layer_index, layer.experts.bundle, layer.experts)


def test_not_a_dispatcher():
    with pytest.raises(ConfigError, match=r"needs the methods dispatch and combine, but .* has no"):
        Balancer("alone", experts=4, dispatcher=object())


def test_ranks_with_different_dispatchers():
    def mixed(comm):
        name = NAMES[comm.rank]
        with pytest.raises(PlanMismatch, match=r"dispatcher='DeepEP'.*dispatcher='DeepEPBuffer'"):
            Balancer(comm, experts=4, dispatcher=dispatcher_of(name)(comm))

    LocalGroup(2).run(mixed)


def first_step_of(example, message, error, *, make, **options):

    def refused(layer, x, gradient):
        with pytest.raises(error, match=message):
            layer(x)
        return True

    ranks = on_every_rank(example, refused, slots=2, dispatcher=make, **options)
    assert ranks == [True] * example.ranks


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_another_dtype(name):
    message = rf"{name} moves rows of torch.bfloat16, got torch.float64; cast the tokens"
    first_step_of(EXAMPLE, message, ConfigError, make=dispatcher_of(name, wide=False))


def test_rows_of_a_slot_in_any_order_under_selective_checkpointing():
    """Results that the mode keeps would belong to other rows in backward."""

    def refused(layer, x, gradient):
        message = "DeepEP may deliver rows in another order when backward recomputes them, so sel"
        with pytest.raises(ConfigError, match=message):
            selective(layer, x, gradient)
        return one_pass(layer, x, gradient)

    on_every_rank(EXAMPLE, refused, slots=2, dispatcher=dispatcher_of("DeepEP"))


@pytest.mark.parametrize("first", ["no tokens", "tokens that stay"])
def test_a_wrong_order_is_found_whatever_the_first_microbatch_holds(first):
    """Rows ordered by source rank pass only if one microbatch needs no other order."""
    by_rank = changed(rows=lambda r: r.rows.flip(0), gates=lambda r: r.gates.flip(0))
    tokens = [0, 0] if first == "no tokens" else [2, 2]
    ids = [torch.full((count, 2), -1) for count in tokens]
    message = r"Broken returned wrong sums for .* or does not order them by slot"
    example = replace(EXAMPLE, tokens=tokens, ids=ids)
    first_step_of(example, message, CommunicationError, make=lambda comm: Broken(comm, by_rank))


@pytest.mark.parametrize("name", NAMES)
def test_widths_that_a_library_cannot_move(name):
    """v1 of DeepEP would return wrong sums."""
    example = Example([8, 6], experts=4, hidden=24, dtype=torch.bfloat16)

    def make(comm):
        dispatcher = dispatcher_of(name, wide=False)(comm)
        del dispatcher.width_multiple
        return dispatcher

    message = rf"{name} moves rows whose width is a multiple of (256|16), got 24"
    first_step_of(example, message, ConfigError, make=make)


@pytest.mark.parametrize("name", ["DeepEP", "DeepEPBuffer"])
def test_libraries_that_were_built_for_int32_ids(name, monkeypatch):
    monkeypatch.setattr(sys.modules["deep_ep"], "topk_idx_t", torch.int32, raising=False)
    theirs = on_every_rank(EXAMPLE, one_pass, slots=2, dispatcher=dispatcher_of(name))
    assert_same_tensors(theirs, on_every_rank(EXAMPLE, one_pass, slots=2))


@pytest.mark.parametrize("name", ["DeepEP", "HybridEP"])
def test_too_many_tokens(name):
    example = Example([70, 70], experts=4)
    message = rf"70 tokens in a microbatch, but {name} is for (64|32): create it and its buffer"
    first_step_of(example, message, LoadError, make=dispatcher_of(name))


def test_slots_are_checked_when_the_balancer_is_created():
    message = r"HybridEP needs a multiple of 4 slots in an NVLink domain, got 2 ranks x 5 slots; ch"

    def refused(comm):
        with pytest.raises(ConfigError, match=message):
            Balancer(comm, experts=6, slots=2, dispatcher=dispatcher_of("HybridEP")(comm))
        return True

    assert LocalGroup(2).run(refused) == [True, True]


def test_a_token_that_has_a_slot_twice():
    """A dense routing map cannot hold it, so HybridEP would lose a row."""
    ids = [torch.tensor([[0, 0]] * count) for count in EXAMPLE.tokens]
    message = r"HybridEP delivered \d+ rows to rank \d, the plan says \d+"
    example = replace(EXAMPLE, ids=ids)
    first_step_of(example, message, CommunicationError, make=dispatcher_of("HybridEP"))


# Libraries.


class Comm:
    rank, size = 0, 1


CONSTRUCTORS = {
    "DeepEP": lambda: DeepEP(ElasticBuffer(Comm)),
    "DeepEPBuffer": lambda: DeepEPBuffer(Buffer(Comm)),
    "HybridEP": lambda: HybridEP(HybridEPBuffer(Comm), tokens=16),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["9.0.0", "0.1", "nightly", None])
def test_an_unknown_version(name, version, monkeypatch):
    library(monkeypatch, "deep_ep", version)
    installed = "no version of it" if version is None else version
    message = rf"\w+ [\d.]+ to [\dx.]+ is needed, but {installed} is installed"
    with pytest.raises(BackendUnavailable, match=message):
        CONSTRUCTORS[name]()


def test_missing_arguments_and_methods(monkeypatch):
    """A version that is known by its number, but has another signature."""
    monkeypatch.setattr(ElasticBuffer, "dispatch", lambda self, x, topk_idx, handle: None)
    message = (
        r"ElasticBuffer.dispatch of deep_ep 2.1.0 lacks topk_weights, num_experts, do_expand, "
        r"num_sms; ultraep knows deep_ep 2.0 to 2.x"
    )
    with pytest.raises(BackendUnavailable, match=message):
        CONSTRUCTORS["DeepEP"]()
    monkeypatch.delattr(HybridEPBuffer, "combine_with_unpermute")
    with pytest.raises(BackendUnavailable, match=r"HybridEPBuffer.combine_with_unpermute of deep"):
        CONSTRUCTORS["HybridEP"]()


REFUSED = {
    "buffers for FP8 rows": (
        lambda: HybridEP(HybridEPBuffer(Comm, use_fp8=True), tokens=16),
        r"bfloat16 gradients, which overrun a buffer for FP8 rows: .* use_fp8=False",
    ),
    "gates in backward": (
        lambda: DeepEP(ElasticBuffer(Comm, allow_multiple_reduction=False)),
        r"create the ElasticBuffer with allow_multiple_reduction=True",
    ),
    "unknown bandwidth": (
        lambda: DeepEP(ElasticBuffer(Comm, nvlink_gbs=0)).check_slots(2, 4),
        r"detects no bandwidth here.*pass DeepEP\(buffer, num_sms=\)",
    ),
    "ranks of a node": (
        lambda: DeepEPBuffer(Buffer(Comm)).check_slots(3, 4),
        r"serves 2, 4 or 8 ranks, or several nodes of 8, got 3",
    ),
    "ranks of two nodes": (
        lambda: DeepEPBuffer(Buffer(Comm)).check_slots(12, 4),
        r"serves 2, 4 or 8 ranks, or several nodes of 8, got 12",
    ),
    "experts of a rank": (
        lambda: DeepEPBuffer(Buffer(Comm)).check_slots(2, 129),
        r"at most 128 experts of a rank, got 129 home experts and spare slots",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_library_cannot_do(name):
    """Refused by name, before a row is sent."""
    make, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        make()


def test_what_a_library_can_do():
    DeepEP(ElasticBuffer(Comm, nvlink_gbs=0), num_sms=8).check_slots(2, 4)
    for ranks in (2, 4, 8, 16):
        DeepEPBuffer(Buffer(Comm)).check_slots(ranks, 128)


def test_ranks_of_an_nvlink_domain(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_of_domain(8) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_of_domain(8) == 2
    monkeypatch.setenv("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "4")
    assert ranks_of_domain(8) == 4


@pytest.mark.parametrize("tokens", [0, 17, "many"])
def test_tokens_of_hybridep(tokens):
    with pytest.raises(ConfigError, match=r"tokens"):
        HybridEP(HybridEPBuffer(Comm), tokens=tokens)
