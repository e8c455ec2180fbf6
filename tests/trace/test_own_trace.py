"""The trace in the repository: a training with EP8 on one GPU."""

from pathlib import Path

import numpy as np
import pytest

import ultraep
from ultraep.tools.replay import differing
from ultraep.tools.sim.workload import read_workload

PATH = Path(__file__).parents[2] / "benchmarks/results/trace_train_ep8_h200_202611.npz"


@pytest.fixture(scope="module")
def trace():
    return ultraep.read_trace(PATH)


def test_the_documented_numbers(trace):
    assert trace.loads.shape == (1800, 8, 64)
    assert (trace.loads.sum(axis=(1, 2)) == 8 * 4096 * 4).all()
    assert trace.imbalance_before.mean() == pytest.approx(1.482, abs=5e-4)
    assert trace.imbalance_before.max() == pytest.approx(4.318, abs=5e-4)
    assert trace.imbalance_after.mean() == pytest.approx(1.003, abs=5e-4)
    assert trace.imbalance_after.max() == pytest.approx(1.046, abs=5e-4)


@pytest.mark.parametrize("number", range(0, 1800, 150))
def test_rows_arrived_as_planned_and_a_new_plan_has_the_same_peak(trace, number):
    recorded = trace.plan(number)
    assert (trace.rank_loads[number] == recorded.rank_loads).all()
    again = ultraep.plan(trace.loads[number], recorded.topology, recorded.config)
    assert again.imbalance == recorded.imbalance
    assert again.num_replicas <= recorded.num_replicas


def test_most_plans_equal_the_recorded_plans(trace):
    assert len(differing(trace)) == 25  # the search has changed where the mean is out of reach


def test_the_simulator_reads_it(trace):
    workload = read_workload(PATH, experts=64, top_k=4)
    loads = workload.expert_loads(2, np.arange(3), 8 * 4096 * 4)
    expected = trace.of_layer(2).loads[:3].sum(axis=1)
    assert (loads == expected).all()
