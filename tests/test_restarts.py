"""Killed jobs resume under torchrun's elastic restart with the losses of an undisturbed run.

torchtitan: tests/frameworks/torchtitan/test_titan_restart.py.
"""

from __future__ import annotations

import json

import pytest
from restarts import EVERY, JOBS, RANKS, check, resumed_steps, schedule, torchrun, warm_ranks


@pytest.mark.parametrize("name", JOBS)
def test_a_schedule_is_repeatable_and_always_leaves_steps_to_run(name):
    job = JOBS[name]
    for seed in range(50):
        kills = schedule(seed, 20, 8, job.writers, job.saves)
        assert kills == schedule(seed, 20, 8, job.writers, job.saves)
        for first, kill in zip(resumed_steps(kills), kills, strict=False):
            assert first <= kill.step <= min(first + EVERY, 8)
            assert (first - 1) % EVERY == 0
            assert kill.rank < RANKS
            assert kill.save < 0 or kill.step % EVERY == 0
    assert any(kill.save >= 0 for kill in kills)
    assert any(kill.save < 0 for kill in kills)
    assert json.loads(json.dumps(kills)) == [list(kill) for kill in kills]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "launch"), [("pretrain", torchrun), ("trainer", warm_ranks)])
def test_a_job_resumes_after_two_kills(name, launch):
    """One rank is killed before step 3, one in the middle of writing the checkpoint of step 4."""
    if name == "trainer":
        pytest.importorskip("accelerate")
        pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)
    report = check(name, 129, 2, steps=6, launch=launch)
    assert [(kill.step, kill.save >= 0) for kill in report.kills] == [(3, False), (4, True)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["pretrain", "trainer"])
def test_a_job_resumes_after_twenty_kills(name):
    check(name, 0, 20)
