"""torchtitan resumes after kills with the losses of an undisturbed run; long: under torchrun."""

from __future__ import annotations

import pytest
from restarts import check, warm_ranks


def test_a_training_resumes_after_two_kills():
    """One rank is killed in a step, one in the middle of writing a checkpoint."""
    report = check("torchtitan", 129, 2, steps=6, launch=warm_ranks)
    assert {kill.save >= 0 for kill in report.kills} == {True, False}


@pytest.mark.long
def test_a_training_resumes_after_twenty_kills():
    check("torchtitan", 0, 20)
