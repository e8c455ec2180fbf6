"""Training resumes from torch.distributed.checkpoint; the program of the page runs."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dense import Example
from ranks import shared_pool
from torch.distributed.checkpoint.api import CheckpointException
from trained import Training, assert_same_history, reference

from ultraep import Balancer, ConfigError, parallel

SAVED, STEPS = 2, 4  # steps until the checkpoint, and all steps


def save(rank, group, wrapper, ep, folder):
    training = Training(wrapper, ep)
    training.steps(SAVED)
    dcp.save(training.state(), checkpoint_id=folder)


def resume(rank, group, wrapper, ep, folder):
    training = Training(wrapper, ep)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    dcp.load(training.state(), checkpoint_id=folder)
    history, _ = reference(STEPS)
    assert_same_history(training.steps(STEPS - SAVED), history[SAVED:])


@pytest.mark.parametrize(
    ("wrapper", "ranks", "ep"),
    [pytest.param("ddp", 2, 2, marks=pytest.mark.slow), ("fsdp, experts too", 4, 2)],
)
def test_training_resumes_on_another_number_of_ranks(tmp_path, wrapper, ranks, ep):
    shared_pool().run(ranks, save, wrapper, ep, tmp_path)
    for size in (1, 3, 4):
        shared_pool().run(size, resume, "ddp", size, tmp_path)
    for other in ("fsdp", "fsdp, experts too"):
        shared_pool().run(4, resume, other, 2, tmp_path)


def load_plain_state(rank, group, folder):
    training = Training("ddp", 1)
    dcp.save({"training": {"model": training.bare.state_dict()}}, checkpoint_id=folder)
    with pytest.raises(CheckpointException, match=r"state_dict: training\.model\.moe\.experts"):
        dcp.load(training.state(), checkpoint_id=folder)


def test_a_checkpoint_of_one_rank_is_refused(tmp_path):
    shared_pool().run(1, load_plain_state, tmp_path)


def test_every_expert_has_its_own_key_and_shares_memory():
    layer = Example([4]).layer(Balancer("alone", experts=8))
    optimizer = torch.optim.AdamW(layer.parameters())
    state = parallel.ShardedState(torch.compile(layer), optimizer).state_dict()
    model = [key for key in state if key.startswith("model.")]
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    assert model == ["model.router.weight", *(f"model.{s}.{e}" for s in stacks for e in range(8))]
    row = state["model.experts.down_proj.3"]
    assert row.data_ptr() == layer.experts.down_proj[3].data_ptr()
    moment = state["optimizer.state.experts.down_proj.exp_avg.3"]
    own = optimizer.state[layer.experts.down_proj]["exp_avg"]
    assert moment.data_ptr() == own[3].data_ptr()
    assert state["optimizer.state.experts.down_proj.step"].ndim == 0


def test_a_model_without_an_optimizer():
    layers = [Example([4], seed=seed).layer(Balancer("alone", experts=8)) for seed in range(2)]
    state = parallel.ShardedState(layers[0]).state_dict()
    assert not any(key.startswith("optimizer.") for key in state)
    parallel.ShardedState(layers[1]).load_state_dict(state)
    for saved, loaded in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(saved, loaded)


def test_moments_that_are_not_stacked_over_experts_are_refused():
    layer = Example([4]).layer(Balancer("alone", experts=8))
    optimizer = torch.optim.AdamW(layer.parameters())
    state = parallel.ShardedState(layer, optimizer)
    state.state_dict()
    moments = optimizer.state[layer.experts.down_proj]
    moments["exp_avg"] = moments["exp_avg"].flatten()
    with pytest.raises(ConfigError, match=r"down_proj\.exp_avg' has 1536 rows for 8 home experts"):
        state.state_dict()


PAGE = Path(__file__).parents[2] / "docs" / "with-ddp-fsdp-dcp.md"


def run_page(rank, group, folder):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    program = "\n".join(re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL))
    names = {"folder": folder}
    exec(program, names)
    assert names["step"](torch.ones(10, 16)) > 0
    return list(names["parallel"].expert_parameters(names["model"]))


def test_the_program_of_the_page_runs(tmp_path):
    names = shared_pool().run(4, run_page, tmp_path)
    assert names == [["1.experts.gate_up_proj", "1.experts.down_proj"]] * 4
    assert list(tmp_path.glob("*.distcp"))
