"""Bytes of a device, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ultraep.tools.sim.memory import memory_of, row_bytes, slot_bytes, weight_bytes
from ultraep.tools.sim.serving import Requests, Serving
from ultraep.tools.sim.training import Training

from .small import small_model

MODEL = small_model()  # 8 experts of 96 weights in all, and 1112 other weights
PREFILL = Serving(
    requests=Requests(name="x", title="", mean_tokens=10.0, spread=0.0, limit_s=1.0), chunk=10
)


def training(**settings: Any) -> Training:
    return Training(**{"tokens": 10, "sequence": 10, "microbatches": 4, "steps": 1, **settings})


def test_weights_of_prefill() -> None:
    assert weight_bytes(MODEL, 2, PREFILL) == 2 * (768 / 2 + 1112)


def test_weights_of_training() -> None:
    # Weights and gradients of all that a device has; of masters and moments only its share.
    assert weight_bytes(MODEL, 2, training()) == 6 * (384 + 1112) + 12 * (384 + 1112 / 2)
    found = weight_bytes(MODEL, 2, training(pipeline=2, groups=3))
    assert found == pytest.approx(6 * (192 + 556) + 12 * (192 / 3 + 556 / 6))


def test_rows_and_slots() -> None:
    # In and out 8 wide, gate, up and their product 4 wide, two bytes each.
    assert row_bytes(MODEL) == 2 * (2 * 8 + 3 * 4)
    assert slot_bytes(MODEL, training=False) == 2 * 96
    assert slot_bytes(MODEL, training=True) == (2 + 4) * 96


def test_prefill_keeps_one_layer() -> None:
    found = memory_of(MODEL, 2, 3, PREFILL, fullest=7)
    assert (found.slots, found.rows) == (3 * 192, 7 * 56)
    assert found.kept == 2 * 10 * 8 * 10
    assert found.total == found.weights + found.slots + found.kept + found.rows


def test_recompute_keeps_the_inputs_of_layers_and_one_layer() -> None:
    found = memory_of(MODEL, 2, 1, training(), fullest=7)
    assert found.kept == 2 * 10 * 8 * (3 + 10)
    assert (found.slots, found.rows) == (576, 7 * 56)


def test_without_recompute_all_layers_are_kept() -> None:
    found = memory_of(MODEL, 2, 1, training(recompute=False), fullest=7)
    # Ten vectors of three layers, and the 20 rows of the two layers that are not at work.
    assert found.kept == 10 * 2 * 10 * 8 * 3 + 2 * 20 * 56


@pytest.mark.parametrize(("parts", "microbatches", "layers"), [(3, 4, 3), (3, 2, 2), (2, 8, 4)])
def test_the_first_part_holds_as_many_microbatches_as_there_are_parts(
    parts: int, microbatches: int, layers: int
) -> None:
    found = memory_of(MODEL, 2, 0, training(pipeline=parts, microbatches=microbatches), fullest=0)
    assert found.kept == 2 * 10 * 8 * (layers + 10)
