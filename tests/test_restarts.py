"""Killed jobs resume under torchrun's elastic restart with the losses of an undisturbed run.

torchtitan: tests/frameworks/torchtitan/test_titan_trainer.py.
"""

import pytest
from restarts import check


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "trainer"])
def test_a_job_resumes_after_two_kills(name, tmp_path):
    if name == "trainer":
        pytest.importorskip("accelerate")
        pytest.importorskip("ultraep.integrations.transformers", exc_type=ImportError)
    check(name, tmp_path)
