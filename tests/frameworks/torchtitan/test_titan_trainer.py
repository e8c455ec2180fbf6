"""The whole Trainer: losses of 20 steps, metrics, and checkpoints of both kinds of runs."""

import shutil

import pytest
import torch
from ranks import shared_pool
from restarts import check
from titan_models import BALANCED, METRICS
from titan_runs import training
from torchtitan_cpu import NEW

LOSS, NORM = "loss_metrics/global_avg_loss", "grad_norm"
OVERRIDES = {"plain": (), "balanced": ((BALANCED, {"slots": 1}), METRICS)}
STEPS, SAVED = 20, 10
LIMIT = 1e-5


def run(kind, folder, **checkpoint):
    options = {"folder": folder, "steps": STEPS}
    return shared_pool().run(2, training, "qwen3", OVERRIDES[kind], options, checkpoint)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train plain and balanced, with a checkpoint in the middle and one at the end."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in OVERRIDES}
    saving = {"enable": True, "interval": SAVED, "last_save_model_only": False}
    return {kind: (folder, run(kind, folder, **saving)) for kind, folder in folders.items()}


def logged(steps, *names):
    return torch.tensor([[step[name] for name in names] for step in steps])


def test_twenty_steps_have_the_same_losses_and_norms(trained):
    plain, balanced = (logged(trained[kind][1][0], LOSS, NORM) for kind in ("plain", "balanced"))
    assert len(plain) == STEPS
    assert plain[-1, 0] < 0.95 * plain[0, 0]  # it learns
    torch.testing.assert_close(balanced, plain, rtol=LIMIT, atol=0)


def test_metrics(trained):
    plain, balanced = (trained[kind][1][0] for kind in ("plain", "balanced"))
    ours = set(balanced[0]) - set(plain[0])
    assert {name.removeprefix("ultraep/") for name in ours} == {
        "imbalance_before",
        "imbalance_after",
        "imbalance_worst",
        "copies",
        "weights_bytes_sent",
        "gradients_bytes_sent",
    }
    before, after, worst = (
        logged(balanced, f"ultraep/imbalance_{name}") for name in ("before", "after", "worst")
    )
    assert (before > after).all()
    assert (after <= worst).all()
    assert after.mean() < 1.01
    assert (logged(balanced, "ultraep/copies") <= 4).all()  # per step: two layers, two ranks
    assert (logged(balanced, "ultraep/weights_bytes_sent").sum(0) > 0).all()


def test_one_balancer_serves_all_layers(trained):
    assert [trained[kind][1][-1] for kind in ("plain", "balanced")] == [0, 1]


@pytest.mark.parametrize(("saved", "loaded"), [("plain", "balanced"), ("balanced", "plain")])
def test_checkpoints_are_interchangeable(saved, loaded, trained, tmp_path):
    folder, (_, weights, moments, _) = trained[saved]
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    _, again, moments_again, _ = run(loaded, tmp_path, enable=True, load_only=True)
    for expected, actual in ((weights, again), (moments, moments_again)):
        assert expected.keys() == actual.keys()
        assert len(expected) > 10
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("saved", "loaded"), [("plain", "balanced"), ("balanced", "plain")])
def test_training_resumes_from_a_checkpoint_of_the_other(saved, loaded, trained, tmp_path):
    folder, (steps, *_) = trained[saved]
    shutil.copytree(folder / "checkpoint", tmp_path / "checkpoint")
    resumed = run(loaded, tmp_path, enable=True, load_only=True, load_step=SAVED)[0]
    assert [step["step"] for step in resumed] == list(range(SAVED + 1, STEPS + 1))
    expected, actual = logged(steps[SAVED:], LOSS, NORM), logged(resumed, LOSS, NORM)
    torch.testing.assert_close(actual, expected, rtol=LIMIT, atol=0)


PIPELINE = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}


@pytest.mark.skipif(not NEW, reason="the framework's own default needs torch 2.14")
@pytest.mark.parametrize(("size", "options"), [(2, {"backend": "spmd_types"}), (4, PIPELINE)])
def test_settings_that_need_a_newer_torch(size, options, tmp_path):
    settings = {"folder": tmp_path, "steps": 4, **options}
    plain, balanced = (
        logged(shared_pool().run(size, training, "qwen3", overrides, settings)[-1][0], LOSS, NORM)
        for overrides in OVERRIDES.values()
    )
    torch.testing.assert_close(balanced, plain, rtol=LIMIT, atol=0)


def test_a_killed_training_resumes_under_torchrun(tmp_path):
    check("torchtitan", tmp_path)
