"""GRPO with replayed routes: training chooses the experts that the rollout chose.

    pip install '.[transformers,trl]'
    torchrun --nproc-per-node 2 examples/grpo_replay.py

TRL's GRPOTrainer trains a tiny Qwen3-MoE with random weights, whose experts are spread over the
ranks. Generation records the experts of every token; the training step chooses them again, with
gates from the current router. All routes of a step are known before its first layer, so all layers
are planned at once, and replicas travel while the layer before computes. Each rank keeps the
routes of its own sequences. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from trl import GRPOConfig, GRPOTrainer

from ultraep.integrations.transformers import BalancedTraining, ImbalanceCallback, balance
from ultraep.routes import Replay, batch_routes, record_routes

LETTERS = "abcdefghijklmnopqrstuvwxyz"
GENERATIONS = 4  # completions of a prompt


class ReplayingTrainer(BalancedTraining, GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer whose training steps replay the routes of the rollout."""

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options)
        self.replay = Replay(self.model, unknown="skip").__enter__()
        self.rollout: Any = None  # of the last generation
        self.replayed = self.tokens = 0  # token-layer pairs with the recorded experts, and all

    def _generate_single_turn(self, *inputs: Any, **options: Any) -> Any:
        with record_routes(self.model) as self.rollout:
            return super()._generate_single_turn(*inputs, **options)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        batch["routes"] = self.rollout.sequences(whole_mask(batch))  # shuffled with the sequences
        return batch

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        routes = batch_routes(inputs["routes"], whole_mask(inputs))
        self.replay.use(routes)
        with record_routes(self.model) as trained:
            loss = super()._compute_loss(model, inputs)
        chosen = trained.routes().flatten(0, 1).transpose(0, 1)
        known = (routes >= 0).all(dim=-1)
        self.replayed += int((chosen == routes).all(dim=-1)[known].sum())
        self.tokens += int(known.sum())
        return loss

    def training_step(self, *inputs: Any, **options: Any) -> Any:
        loss = super().training_step(*inputs, **options)
        self.replay.use(None)  # generation routes by itself
        return loss


def whole_mask(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the `[B, S]` mask of prompts and completions."""
    return torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_model(vocabulary: int) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name:  # routers that prefer some experts
            parameter.data += torch.randn(len(parameter), 1)
    return model


def reward(completions: list[str], **_: Any) -> list[float]:
    """Reward early letters of the alphabet."""
    return [sum(letter < "n" for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (default: 4)")
    options = parser.parse_args()
    # Replicas of such small experts save no time: plan for balance instead.
    os.environ.setdefault("ULTRAEP_RATES", "off")
    words = [LETTERS[first : first + 3 + first % 4] for first in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(  # initialises torch.distributed
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=12,
            max_steps=options.steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            ddp_backend="gloo",
        )
        letters = tokenizer()
        model = tiny_model(len(letters))
        balance(model, slots=1, in_flight=2)
        trainer = ReplayingTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": words}),
            processing_class=letters,
        )
        trainer.remove_callback(PrinterCallback)
        ImbalanceCallback(model).add_to(trainer)
        trainer.train()
    if dist.get_rank() == 0:
        for logs in trainer.state.log_history:
            if "ultraep/imbalance_before" in logs and "reward" in logs:
                print(
                    f"step {logs['step']}: reward {logs['reward']:.2f}, imbalance "
                    f"{logs['ultraep/imbalance_before']:.2f} -> "
                    f"{logs['ultraep/imbalance_after']:.2f}, {logs['ultraep/replicas']:g} replicas"
                )
    print(f"rank {dist.get_rank()}: {trainer.replayed} of {trainer.tokens} routes replayed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
