"""The Trainer of the library for balanced models, and a callback for all trainers.

Every rank has different experts. The Trainer averages their gradients, which DDP ignores; clips by
a norm that counts every expert once; and saves weights and optimizer state of all ranks in
checkpoints that load on any number of ranks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from ultraep.errors import ConfigError
from ultraep.integrations.transformers.balance import balancers
from ultraep.integrations.transformers.experts import balanced_experts
from ultraep.metrics.reading import Metrics
from ultraep.parallel.checkpoint import ShardedState
from ultraep.parallel.gradients import average_expert_gradients, clip_grad_norm
from ultraep.parallel.wrapped import leave_out_experts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

STATE, SCHEDULER, TRAINER_STATE = "sharded_state", "scheduler.pt", "trainer_state.json"
UNFINISHED = ".unfinished"  # folder for a checkpoint until all ranks have written it
PREFIX = "ultraep"  # of figures in logs
_Base: Any = Trainer if TYPE_CHECKING else object


class BalancedTraining(_Base):  # type: ignore[misc]
    """A mixin for Trainer classes; list it before the Trainer class.

    dp_replicas: the group of ranks with the same experts as this rank, if there are several.
    """

    dp_replicas: ProcessGroup | None = None
    _saving = False

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options)
        if not balanced_experts(self.model):
            raise ConfigError(f"{type(self.model).__name__} is not balanced: call balance first")
        if self.args.fp16:
            raise ConfigError("fp16 uses a different loss scale on each rank: use bf16 or float32")
        leave_out_experts(self.model)  # again, in case an adapter now wraps the model

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:  # noqa: ARG002
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:  # noqa: ARG002
        return self._norm(float("inf")) if grad_norm is None else grad_norm

    def _norm(self, limit: float) -> torch.Tensor:
        average_expert_gradients(self.model, self.dp_replicas)
        return clip_grad_norm(self.model, limit)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the weights of all ranks, for `from_pretrained`. Collective."""
        if self.args.should_save:
            super().save_model(output_dir, _internal_call)
        elif isinstance(self.model, PreTrainedModel):  # adapters have no experts to save
            self.model.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint and name it when all ranks have written: it is whole or missing."""
        if self.args.push_to_hub:  # uploads the folder in the background
            super()._save_checkpoint(model, trial)
            return
        folder = Path(self._get_output_dir(trial))
        if self.args.should_save:  # a killed run may have left one
            shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
        _barrier()
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        _barrier()
        self._finish_checkpoint(folder, f"checkpoint-{self.state.global_step}")
        _barrier()

    def _get_output_dir(self, trial: Any) -> str:
        folder: str = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._saving else folder

    def _finish_checkpoint(self, folder: Path, name: str) -> None:
        unfinished, state = folder / UNFINISHED / name, self.state
        if state.best_model_checkpoint == str(unfinished):
            state.best_model_checkpoint = str(folder / name)
        if not self.args.should_save:
            return
        state.save_to_json(str(unfinished / TRAINER_STATE))
        if (folder / name).exists():  # of an earlier run
            (folder / name).rename(folder / UNFINISHED / f"old-{name}")
        unfinished.rename(folder / name)
        shutil.rmtree(folder / UNFINISHED)
        limit, best = self.args.save_total_limit, state.best_model_checkpoint
        rotate_checkpoints(str(folder), limit, best, use_mtime=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save({"training": self._state()}, checkpoint_id=Path(output_dir) / STATE)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:  # noqa: ARG002
        if not (Path(folder) / STATE).is_dir():
            raise ConfigError(f"{folder} has no {STATE}: BalancedTrainer did not save it")
        self._load(folder, ShardedState(self.model))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load(checkpoint, self._state())
            scheduler = torch.load(Path(checkpoint) / SCHEDULER, weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load(self, folder: str, state: ShardedState) -> None:
        load({"training": state}, checkpoint_id=Path(folder) / STATE)
        _barrier()

    def _state(self) -> ShardedState:
        return ShardedState(self.model, getattr(self.optimizer, "optimizer", self.optimizer))


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class BalancedTrainer(BalancedTraining, Trainer):  # type: ignore[misc]
    """The Trainer of the library for balanced models."""


class ImbalanceCallback(TrainerCallback):  # type: ignore[misc]
    """Adds what balancing did since the last log, on this rank, to the logs of a trainer.

    ultraep/imbalance_before, ultraep/imbalance_after: load of the busiest rank over the mean,
        without replicas and as planned, averaged over layers and microbatches.
    ultraep/replicas: replicas per optimizer step, of all layers.
    """

    def __init__(self, model: nn.Module) -> None:
        owners = balancers(model)
        if not owners:
            raise ConfigError(f"{type(model).__name__} is not balanced: call balance first")
        self._metrics, self._last_step = Metrics(*owners), 0

    def add_to(self, trainer: Any) -> None:
        """Add the callback to a trainer, before the callbacks that report logs elsewhere."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Count from here on."""
        self._metrics.read()
        self._last_step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Add the figures to the logs and to the history of the trainer."""
        values = self._metrics.read().values
        if not values["microbatches"] or logs is None:
            return
        steps = max(1, state.global_step - self._last_step)
        figures = {
            f"{PREFIX}/imbalance_before": round(values["imbalance_before"], 4),
            f"{PREFIX}/imbalance_after": round(values["imbalance_after"], 4),
            f"{PREFIX}/replicas": round(values["copies"] / steps, 4),
        }
        logs.update(figures)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(figures)
        self._last_step = state.global_step
