"""The library's Trainer, on ranks with a balanced model, and alone with the unmodified one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from equality import quiet
from families import VOCABULARY, build
from transformers import Trainer, TrainerCallback, TrainingArguments

from ultraep import ConfigError
from ultraep.integrations.transformers import (
    BalancedTrainer,
    balance,
    balanced_experts,
    balanced_from_pretrained,
)

STEPS = 6


def samples(count: int = 64) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(3, VOCABULARY, (count, 12), generator=draw)
    return [{"input_ids": row, "labels": row} for row in rows]


class Losses(TrainerCallback):
    """What the Trainer logs at each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_log(self, args, state, control, logs=None, **others):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.norms.append(float(logs["grad_norm"]))


def arguments(folder: Path, batch: int, **others: Any) -> TrainingArguments:
    told = {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch,
        "max_steps": STEPS,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "max_grad_norm": 0.3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "train_sampling_strategy": "sequential",
        "seed": 1,
    }
    return TrainingArguments(**(told | others))


def forget_accelerate() -> None:
    """The library keeps who its ranks are, for a process; here it is another group every time."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@contextmanager
def under_torchrun(rank: int, size: int) -> Iterator[None]:
    """What torchrun tells its processes; the group that there is stays."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in told.items()})
    forget_accelerate()
    try:
        with quiet(), redirect_stdout(None):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_accelerate()


def alone(folder: Path, batch: int, **others: Any) -> tuple[list[float], list[float]]:
    """In one process, without torch.distributed: the reference."""
    losses = Losses()
    forget_accelerate()
    with quiet(), redirect_stdout(None):
        trainer = Trainer(
            model=build("mixtral", **others.pop("model", {})),
            args=arguments(folder, batch, **others),
            train_dataset=samples(),
            callbacks=[losses],
        )
        trainer.train()
    forget_accelerate()
    return losses.losses, losses.norms


def on_ranks(rank: int, group: Any, folder: Path, **others: Any) -> Any:
    """Balanced; stops in the middle, and begins again from the checkpoint."""
    with under_torchrun(rank, group.size()):
        losses, found = Losses(), {}
        model = build("mixtral", **others.pop("model", {}))
        balance(model, group)
        settings = others | {"save_strategy": "steps", "save_steps": STEPS // 2}
        options = {"train_dataset": samples(), "callbacks": [losses]}
        BalancedTrainer(model=model, args=arguments(folder, 4, **settings), **options).train()
        found["losses"], found["norms"] = list(losses.losses), list(losses.norms)
        whole = balanced_from_pretrained(folder / f"checkpoint-{STEPS}", group)
        found["saved"] = all(
            torch.equal(tensor, model.state_dict()[name])
            for name, tensor in whole.state_dict().items()
        )
        losses.losses.clear()
        again = build("mixtral")
        balance(again, group)
        trainer = BalancedTrainer(model=again, args=arguments(folder, 4, **settings), **options)
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}"))
        found["resumed"] = list(losses.losses)
        found["same end"] = all(  # weights at other addresses, so up to rounding
            torch.allclose(one, two, rtol=1e-5, atol=1e-5)
            for one, two in zip(model.parameters(), again.parameters(), strict=True)
        )
        found["experts"] = len(balanced_experts(again))
        dist.barrier()
        return found


def refusals(rank: int, group: Any, folder: Path) -> list[str]:
    """What is said to those who would train something else than they think."""
    told = []
    with under_torchrun(rank, group.size()):
        for balanced, options in ((False, {}), (True, {"fp16": True})):
            model = build("mixtral")
            if balanced:
                balance(model, group)
            try:
                BalancedTrainer(model=model, args=arguments(folder, 4, **options))
            except ConfigError as error:
                told.append(str(error))
        try:
            trainer = BalancedTrainer(model=model, args=arguments(folder, 4))
            trainer.train(resume_from_checkpoint=str(folder))
        except ConfigError as error:
            told.append(str(error))
        dist.barrier()
    return told
