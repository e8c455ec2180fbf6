"""Pretrain a Mixture-of-Experts language model on your own text, balancing every microbatch.

    python examples/pretrain.py --config examples/pretrain.toml
    torchrun --nproc-per-node 4 examples/pretrain.py --config examples/pretrain.toml
    torchrun --nproc-per-node 2 examples/pretrain.py --config examples/pretrain.toml --resume
    torchrun --standalone --max-restarts 3 examples/pretrain.py --elastic  # see README.md

A script to copy. The eight places that use ultraep are numbered, `# ultraep 1` to 8; the layer
itself is in `Block` of `ultraep_tools.demo.model`. Settings are in pretrain_settings.py; text,
checkpoint files, scalars and signals are in pretrain_parts.py.

Shapes: M microbatches, B windows of this rank in each, T bytes of a window.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pretrain_parts import (
    Scalars,
    Stop,
    Windows,
    check_store,
    checkpoint_of,
    checkpoints,
    connected,
    naming,
    own_gpu,
    process_group,
    read_text,
    remove_unfinished,
    rng_state,
    set_rng_state,
    trace_folder,
    write_whole,
)
from pretrain_settings import Settings, read_settings
from torch.nn.functional import cross_entropy

import ultraep
from ultraep import parallel
from ultraep.topology import even_homes
from ultraep_tools.demo.model import TinyMoE, next_byte_loss

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
ONE_RANK = {"RANK": 0, "WORLD_SIZE": 1}  # unless torchrun says otherwise
DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}  # weights


class Pretraining:
    """One rank of the training. The constructor and all methods are collective."""

    def __init__(self, settings: Settings, text: Windows, start: int, stack: ExitStack) -> None:
        self.settings, self.text = settings, text
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.done = self.drawn = 0  # steps done, windows read
        self.stopping = False  # whether a rank received a signal
        self.device = torch.device("cpu")
        if settings.parallel.device == "cuda":
            self.device = own_gpu(self.rank)
        ep = settings.group_size(self.size)
        rows = np.arange(self.size).reshape(-1, ep)
        self.group, _ = dist.new_subgroups_by_enumeration(rows.tolist())  # expert-parallel
        # The ranks that hold the same experts as this one.
        self.dp_replicas, _ = dist.new_subgroups_by_enumeration(rows.T.tolist())
        self.balancer = stack.enter_context(closing(self.make_balancer(ep, start)))
        training, model = settings.training, settings.model
        self.model = TinyMoE(  # ultraep 1: its MLPs are ultraep.BalancedMoE.swiglu(...)
            model, self.balancer, seed=training.seed, checkpointing=training.recompute
        ).to(self.device, DTYPES[training.precision])
        self.dense = parallel.dense_parameters(self.model).values()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=training.lr,
            betas=(0.9, 0.95),
            weight_decay=training.weight_decay,
        )
        self.seed_anew()
        self.roll = dist.new_group()  # to find out which ranks are alive

    def make_balancer(self, ep: int, start: int) -> ultraep.Balancer:
        """Return the balancer of this expert-parallel group."""
        balance = self.settings.balance
        return ultraep.Balancer(  # ultraep 2: one for all layers of an expert-parallel group
            self.group,
            experts=even_homes(self.settings.model.experts, ep),
            slots=balance.slots,
            domain=balance.domain or None,
            config=ultraep.BalanceConfig(
                policy=balance.policy,
                tolerance=balance.tolerance,
                objective="balance",  # no measured rates, so that a resumed run is exact
            ),
            timeout=self.settings.parallel.timeout or None,
            record=trace_folder(self.settings.logging.record, start, self.rank // ep),
        )

    def step(self, stop: bool) -> dict[str, float]:
        """Run one optimizer step and return its scalars. `stop`: this rank received a signal."""
        begin, training = time.perf_counter(), self.settings.training
        self.balancer.record_step(self.done)  # ultraep 3: if a trace is recorded
        plans: list[ultraep.Plan] = []
        totals = torch.zeros(2, dtype=torch.float64)  # loss; ranks that received a signal
        tokens, share = self.batch(), 1 / training.microbatches
        for first in range(0, training.microbatches, training.in_flight):
            waiting = []
            for tokens_BT in tokens[first : first + training.in_flight]:
                with self.autocast():
                    loss = next_byte_loss(self.model, tokens_BT)
                waiting.append(share * (loss + training.even * self.model.unevenness))
                plans += self.model.last_plans()  # ultraep 4: the plan of every layer
                totals[0] += share / self.size * loss.detach().cpu()
            for loss in waiting:  # backward refills the spare slots, in any order
                loss.backward()
        totals[1] = stop
        norm = self.descend()
        self.sum(totals)
        if not math.isfinite(totals[0]):
            raise ultraep.UltraEPError(f"step {self.done}: the loss is {totals[0].item()}")
        self.stopping = bool(totals[1])
        return {
            "loss": totals[0].item(),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "gradient_norm": norm,
            "tokens_per_second": training.batch * training.length / (time.perf_counter() - begin),
            "imbalance_before": fmean(plan.initial_imbalance for plan in plans),
            "imbalance_after": fmean(plan.imbalance for plan in plans),
            "replicas": sum(plan.num_replicas for plan in plans),
        }

    def batch(self) -> torch.Tensor:
        """Return `[M, B, T + 1]` tokens. A microbatch is the same text on any number of ranks."""
        training = self.settings.training
        numbers = self.text.after(self.drawn, training.batch)
        self.drawn += training.batch
        mine = numbers.reshape(training.microbatches, self.size, -1)[:, self.rank]
        return self.text[mine.ravel()].unflatten(0, mine.shape).to(self.device)

    def autocast(self) -> torch.autocast:
        """With bfloat16, rows are sent with half the bytes; weights stay float32."""
        bfloat16 = self.settings.training.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16)

    def descend(self) -> float:
        """Average and clip the gradients, update the weights, return the norm before clipping."""
        dense = [p.grad for p in self.dense if p.grad is not None]
        self.sum(*dense)
        for gradient in dense:
            gradient /= self.size
        with connected():  # ultraep 5: expert gradients are already sums over the group
            parallel.average_expert_gradients(self.model, self.dp_replicas)
            largest = self.settings.training.clip or math.inf
            norm = parallel.clip_grad_norm(self.model, largest)  # ultraep 6: counts all experts
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return norm.item()

    def learning_rate(self) -> float:
        """Return the rate of the next step: linear warmup, then a cosine."""
        training = self.settings.training
        if self.done < training.warmup:
            return training.lr * (self.done + 1) / training.warmup
        progress = (self.done - training.warmup) / max(1, training.steps - training.warmup)
        share = training.final_lr + (1 - training.final_lr) * (1 + math.cos(math.pi * progress)) / 2
        return training.lr * share

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return the loss on held-out text, the same text on any number of ranks."""
        training, held = self.settings.training, self.text.held_out
        total = torch.zeros((), dtype=torch.float64)
        rows = training.batch // training.microbatches // self.size
        self.model.eval()
        for begin in range(0, len(held), rows * self.size):  # the same passes on all ranks
            mine = held[begin + self.rank * rows :][:rows]  # may be empty at the end
            tokens = self.text[mine].to(self.device)
            with self.autocast():
                logits = self.model(tokens[:, :-1]).flatten(0, 1)
                total += cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").cpu()
        self.model.train()
        self.sum(total)
        loss = total.item() / (len(held) * self.text.length)
        return {"held_out_loss": loss, "held_out_bits_per_byte": loss / math.log(2)}

    def save(self, folder: Path, keep: int) -> Path:
        """Write a checkpoint atomically; keep the last few."""
        path, rng = folder / f"step-{self.done:08d}.pt", self.everyone(rng_state(self.device))
        parts = self.on_first_rank(on_host(self.state().state_dict()))
        if self.rank == 0:
            content = {
                "config": asdict(self.settings.model),
                "step": self.done,
                "text": self.text_position(),
                "rng": rng,
                "state": {key: value for part in parts for key, value in part.items()},
            }
            write_whole(content, path)
            for old in checkpoints(folder)[:-keep]:
                old.unlink()
        self.everyone("written")  # wait: writing may take longer than the timeout
        return path

    def state(self) -> parallel.ShardedState:
        """The state of model and optimizer, an entry for each expert that this rank holds."""
        return parallel.ShardedState(self.model, self.optimizer)  # ultraep 7: also for `dcp.save`

    def text_position(self) -> dict[str, Any]:
        text = self.text
        return {
            "digest": text.digest,
            "length": text.length,
            "seed": text.seed,
            "held_out": self.settings.data.held_out,
            "drawn": self.drawn,
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint, saved on any number of ranks."""
        self.done, self.drawn = saved["step"], saved["text"]["drawn"]
        self.compare(saved["config"] | saved["text"])
        self.state().load_state_dict(saved["state"])  # ultraep 8: takes the home experts
        if len(saved["rng"]) == self.size:
            set_rng_state(saved["rng"][self.rank])
        else:
            self.seed_anew()

    def compare(self, saved: dict[str, Any]) -> None:
        for name, now in (asdict(self.settings.model) | self.text_position()).items():
            if saved[name] != now:
                what = "text" if name == "digest" else name
                raise ultraep.ConfigError(
                    f"cannot resume: {what} was {saved[name]} in the checkpoint, now it is {now}"
                )

    def seed_anew(self) -> None:
        """Seed the random state of this rank, for models with dropout (not this one)."""
        drawn = np.random.SeedSequence([self.settings.training.seed, self.done, self.rank])
        torch.manual_seed(int(drawn.generate_state(1)[0]))

    def sum(self, *tensors: torch.Tensor) -> None:
        """Sum tensors over all ranks, in place, in one message."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with connected():
            dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def everyone(self, mine: Any) -> list[Any]:
        """Return the values of all ranks; also a barrier."""
        values = [None] * self.size
        with connected():
            dist.all_gather_object(values, mine)
        return values

    def on_first_rank(self, mine: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, and nothing on the others."""
        values = [None] * self.size if self.rank == 0 else None
        with connected():
            dist.gather_object(mine, values)
        return values or []


def on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def run(settings: Settings, resume: str | None) -> None:
    """Train to the last step, or until a signal."""
    steps, files = settings.training.steps, settings.checkpoints
    saved = checkpoint_of(resume, Path(files.folder))
    start = saved["step"] if saved else 0
    text = Windows(read_text(settings.data.files, settings.data.pattern), settings)
    with ExitStack() as stack:
        training = Pretraining(settings, text, start, stack)
        for rank, known in enumerate(training.everyone((settings, text.digest, start))):
            if known != (settings, text.digest, start):
                raise ultraep.ConfigError(f"rank {rank} has other settings, text or checkpoint")
        if training.rank == 0:
            remove_unfinished(Path(files.folder))
        if saved:
            training.load(saved)
        del saved  # closes the file
        scalars, stop = Scalars(settings, start, stack), stack.enter_context(Stop())
        stack.enter_context(naming(training.roll))
        if start >= steps:
            scalars.say(f"nothing to do: the checkpoint has {start} steps of {steps}")
        while training.done < steps and not training.stopping:
            values, done = training.step(stop.requested), training.done
            last = done == steps or training.stopping
            if last or done % settings.logging.every == 0 or done == 1:
                scalars.add(done, values)
            if done == steps or done % settings.evaluation.every == 0:
                scalars.add(done, training.evaluate())
            if last or done % files.every == 0:
                path = training.save(Path(files.folder), files.keep)
                scalars.say(f"step {done:>6}   written: {path}")
        if training.stopping and training.done < steps:
            scalars.say(f"stopped after step {training.done}; use --resume")


def parse(argv: list[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--config", metavar="FILE", help="settings in TOML (default: built in)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="FILE",
        help="continue from this checkpoint (default: the last in checkpoints.folder)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="continue from the last checkpoint if there is one, for torchrun --max-restarts",
    )
    parser.add_argument("--no-tensorboard", action="store_true", help="do not write curves")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rank, size = (int(os.environ.get(name, usual)) for name, usual in ONE_RANK.items())
    changes = ["logging.tensorboard=false"] if args.no_tensorboard else []
    try:
        settings = read_settings(args.config, [*args.set, *changes])
        settings.check(size)
        if args.elastic:
            check_store()
    except ultraep.UltraEPError as error:
        if rank == 0:  # the same on all ranks
            print(f"pretrain: {error}", file=sys.stderr)
        return 2
    if args.elastic and args.resume is None and checkpoints(Path(settings.checkpoints.folder)):
        args.resume = ""
    with process_group(BACKENDS[settings.parallel.device]):
        try:
            run(settings, args.resume)
        except ultraep.UltraEPError as error:
            print(f"rank {rank}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
