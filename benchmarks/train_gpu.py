"""Train a byte-level MoE language model as EP8 on one card, and keep the trace of it.

Green contexts cut the card into eight partitions, one for each rank of the group. Every rank has a
CUDA graph of the whole model, forward and backward, on the mapped data plane; all graphs run at the
same time and wait for each other by the memory that they share. The text is Python's own library:
code, prose and tables, one after the other, again and again. Loads of every layer, and the rows
that really arrived in every slot, are read from the card and recorded.

    python benchmarks/train_gpu.py --steps 3000 --out run          # needs a GPU and cuda-python
    ultraep trace export run/trace --npz small.npz

Shapes: R ranks, H layers, E experts, L slots of a rank, B sequences, T tokens.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import on_gpu
from torch import nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention
from world import Card, Partition, Rank, split

import ultraep
from ultraep.arrays import IntArray
from ultraep.files.writing import write_text
from ultraep.tools.tiny.model import VOCABULARY, rotate
from ultraep.tools.tiny.text import Text, files, prose, tables

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
EVEN = 1e-3  # weight of the auxiliary loss that asks routers to be even
SUBJECTS: dict[str, Callable[[], bytes]] = {
    "code": partial(files, "*.py", "*/*.py"),
    "prose": prose,
    "tables": tables,
}
TOLD = 100  # steps between two lines


@dataclass(frozen=True)
class Options:
    """The model and its training; tokens are those of one rank."""

    ranks: int = 8
    sms: int = 16
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    ffn: int = 512
    experts: int = 64
    top_k: int = 4
    sequences: int = 8
    length: int = 512
    steps: int = 3000
    period: int = 250  # steps until the subject changes
    every: int = 10  # steps between two that are recorded
    lr: float = 1e-3
    warmup: int = 100
    slots: int = 1
    policy: str = "ultraep"
    seed: int = 0

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


class Block(nn.Module):
    """Attention, then experts."""

    def __init__(self, options: Options, balancer: Any, layer: int) -> None:
        super().__init__()
        width = options.hidden
        made: dict[str, Any] = {"dtype": BF16, "device": CUDA}
        self.heads = options.heads
        self.norms = nn.ModuleList(nn.RMSNorm(width, **made) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False, **made)
        self.out = nn.Linear(width, width, bias=False, **made)
        self.moe = ultraep.BalancedMoE.swiglu(
            width,
            options.ffn,
            options.experts,
            options.top_k,
            balancer=balancer,
            seed=1000 * options.seed + 2 * layer,
            dtype=BF16,
            device=CUDA,
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor, *, alone: bool) -> Any:
        """What comes out, and how uneven the router was; `alone`: without the experts."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k = (rotate(part.float(), positions).to(BF16) for part in (q, k))
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        inner = self.norms[1](x)
        uneven = self.unevenness(inner)
        return (x if alone else x + self.moe(inner)), uneven

    def unevenness(self, x: torch.Tensor) -> torch.Tensor:
        """The usual auxiliary loss, of this rank: loads of the experts times probabilities."""
        router: Any = self.moe.router
        likely = linear(x.flatten(0, 1).float(), router.weight.float()).softmax(dim=-1)
        chosen = torch.zeros_like(likely).scatter_(1, likely.topk(router.top_k).indices, 1.0)
        share = chosen.mean(dim=0) / router.top_k
        uneven: torch.Tensor = likely.shape[1] * (share * likely.mean(dim=0)).sum()
        return uneven


class Model(nn.Module):
    """Bytes in, loss out."""

    def __init__(self, options: Options, balancer: Any) -> None:
        super().__init__()
        torch.manual_seed(options.seed)
        self.embedding = nn.Embedding(VOCABULARY, options.hidden, dtype=BF16, device=CUDA)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(options, balancer, n) for n in range(options.layers))
        self.norm = nn.RMSNorm(options.hidden, dtype=BF16, device=CUDA)

    def forward(self, tokens: torch.Tensor, *, alone: bool = False) -> tuple[Any, Any]:
        """The loss of the next bytes, and all of it with the auxiliary one."""
        said, wanted = tokens[:, :-1], tokens[:, 1:]
        positions = torch.arange(said.shape[1], device=CUDA).expand_as(said)
        x, uneven = self.embedding(said), torch.zeros((), device=CUDA)
        for block in self.blocks:
            x, part = block(x, positions, alone=alone)
            uneven = uneven + part
        logits = linear(self.norm(x), self.embedding.weight).float()
        loss = cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return loss, loss + EVEN * uneven / len(self.blocks)


class ModelRank(Rank):
    """A rank with its part of the model; a step is its forward and backward pass."""

    def __init__(
        self,
        number: int,
        options: Options,
        partition: Partition,
        peers: Any,
        aside: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(number, partition)
        self.join(
            peers,
            aside or self.stream,  # one after the other: a graph without branches
            experts=options.experts,
            tokens=options.tokens,
            slots=options.slots,
            policy=options.policy,
            capacity=options.ranks * options.tokens * options.top_k,  # whatever the router does
            timeout=10.0,
        )
        self.model = Model(options, self.balancer)
        ids = torch.zeros(options.tokens, options.top_k, dtype=torch.int64, device=CUDA)
        row = torch.zeros(1, options.hidden, dtype=BF16, device=CUDA)
        for block in self.blocks():
            self.balancer.prepare(ids, row, block.moe.experts.bundle)
        shape = (options.sequences, options.length + 1)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=CUDA)
        self.loss = torch.zeros((), device=CUDA)
        self.counts = torch.zeros(options.layers, options.experts, dtype=torch.int32, device=CUDA)
        slots = options.experts // options.ranks + options.slots
        self.begins = torch.zeros(options.layers, slots + 1, dtype=torch.int32, device=CUDA)
        self.watch()

    def blocks(self) -> Iterator[Any]:
        yield from self.model.blocks

    def watch(self) -> None:
        """Have every layer note its loads, and the rows that arrived."""
        for layer, block in enumerate(self.blocks()):

            def count(_: Any, __: Any, found: Any, layer: int = layer) -> None:
                ids = found[0].flatten().long()
                ones = torch.ones_like(ids, dtype=torch.int32)
                self.counts[layer].zero_().scatter_add_(0, ids, ones)

            def arrive(_: Any, given: Any, layer: int = layer) -> None:
                self.begins[layer].copy_(given[0].offsets)

            block.moe.router.register_forward_hook(count)
            block.moe.experts.register_forward_pre_hook(arrive)

    def warm(self) -> None:
        """Load and allocate what the rest of the model needs, with nobody waiting for anybody."""
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                self.model(self.tokens, alone=True)[1].backward()
        torch.cuda.synchronize()

    def step(self) -> None:
        loss, whole = self.model(self.tokens)
        whole.backward()
        self.loss.copy_(loss.detach())

    def capture(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        super().capture()


class Training(Card):
    """All ranks of the card, and one optimizer for all of them.

    Experts are trained where they are. Of the rest every rank has a copy; its gradients are
    averaged. Weights are BF16, the optimizer keeps them in FP32.
    """

    def __init__(self, options: Options) -> None:
        from ultraep.runtime.mapped.peers import LocalPeers

        self.options = options
        group = LocalPeers(options.ranks)
        parts = split(options.ranks, options.sms)
        super().__init__([ModelRank(n, options, part, group.of(n)) for n, part in enumerate(parts)])
        named = [dict(rank.model.named_parameters()) for rank in self.ranks]
        self.experts = [p for own in named for name, p in own.items() if ".experts." in name]
        self.rest: list[list[Any]] = [
            [p for name, p in own.items() if ".experts." not in name] for own in named
        ]
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.warm()
        self.capture()
        self.trained: list[Any] = [*self.experts, *self.rest[0]]
        self.masters = [parameter.detach().float() for parameter in self.trained]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=options.lr, betas=(0.9, 0.95), fused=True
        )

    def step(self, number: int, tokens: torch.Tensor) -> None:
        """One step of all ranks, then of the optimizer."""
        for rank, own in zip(self.ranks, tokens, strict=True):
            rank.tokens.copy_(own, non_blocking=True)
        self.replay()
        torch.cuda.synchronize()
        self.descend(number)

    @torch.no_grad()
    def descend(self, number: int) -> None:
        """Gradients of all ranks into the masters, and these into the weights of all ranks."""
        shared = [[p.grad for p in own] for own in self.rest]
        for other in shared[1:]:
            torch._foreach_add_(shared[0], other)
        gradients = [*(p.grad for p in self.experts), *shared[0]]
        for master, gradient in zip(self.masters, gradients, strict=True):
            assert gradient is not None
            master.grad = gradient.float() / self.options.ranks
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (number + 1) / self.options.warmup)
        self.optimizer.step()
        torch._foreach_copy_(self.trained, self.masters)
        for own in self.rest[1:]:
            torch._foreach_copy_(own, self.rest[0])

    def losses(self) -> float:
        return float(torch.stack([rank.loss for rank in self.ranks]).mean())

    def loads(self) -> IntArray:
        """[H, R, E] of the last step."""
        return np.stack([rank.counts.cpu().numpy() for rank in self.ranks], axis=1).astype(np.int64)

    def arrived(self) -> IntArray:
        """[H, R, L] rows of every slot in the last step."""
        begins = np.stack([rank.begins.cpu().numpy() for rank in self.ranks], axis=1)
        return np.diff(begins, axis=2).astype(np.int64)


def batch(text: Text, options: Options, step: int) -> torch.Tensor:
    """[R, B, T + 1] sequences of all ranks."""
    made = []
    for rank in range(options.ranks):
        rng = np.random.default_rng([options.seed, step, rank])
        subjects = text.shifting(rng, step, options.sequences, options.period)
        made.append(text.sequences(rng, subjects, options.length + 1))
    return torch.stack(made).pin_memory()


def note(world: Training, recorders: list[Any], step: int) -> tuple[float, float]:
    """Record the last step; its mean imbalance before, and after by the rows that arrived."""
    world.check()
    topology, config = world.ranks[0].balancer.topology, world.ranks[0].balancer.config
    found = []
    for layer, (loads, slot_rows) in enumerate(zip(world.loads(), world.arrived(), strict=True)):
        plan = ultraep.plan(loads, topology, config)
        rows = slot_rows.sum(axis=1)
        assert (rows == plan.rank_loads).all(), (step, layer, rows, plan.rank_loads)
        found.append((plan.initial_imbalance, rows.max() / rows.mean()))
        for recorder in recorders:
            recorder.add(step=step, layer=layer, plan=plan, slot_rows=slot_rows[recorder.rank])
    before, after = np.mean(found, axis=0)
    return float(before), float(after)


def train(options: Options, out: Path) -> dict[str, Any]:
    """All steps; what was measured."""
    text = Text(SUBJECTS)
    world = Training(options)
    balancer = world.ranks[0].balancer
    told = f"train_gpu.py: bytes of Python's library, {json.dumps(asdict(options))}"
    recorders = [
        ultraep.Recorder(out / "trace", balancer.topology, balancer.config, rank=rank, note=told)
        for rank in range(options.ranks)
    ]
    curve, began = [], time.perf_counter()
    for step in range(options.steps):
        world.step(step, batch(text, options, step))
        if step % options.every == 0:
            before, after = note(world, recorders, step)
            subject = text.names[text.main(step, options.period)]
            seconds = time.perf_counter() - began
            curve.append([step, world.losses(), before, after, subject, seconds])
            if step % TOLD == 0:
                print(
                    f"{step:6d}  loss {curve[-1][1]:.3f}  imbalance {before:.3f} -> {after:.3f}  "
                    f"{subject:7s} {seconds:6.1f} s",
                    flush=True,
                )
    world.check()
    for recorder in recorders:
        recorder.close()
    took = time.perf_counter() - began
    tokens = options.steps * options.ranks * options.tokens
    return {"options": asdict(options), "tokens_per_second": tokens / took, "curve": curve}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=Options.steps)
    parser.add_argument("--policy", default=Options.policy, choices=("ultraep", "none"))
    parser.add_argument("--every", type=int, default=Options.every)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for trace and result")
    given = parser.parse_args()
    on_gpu(toy=False)
    options = Options(steps=given.steps, policy=given.policy, every=given.every, seed=given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    result = train(options, given.out)
    write_text(given.out / "result.json", json.dumps(result) + "\n")
    print(f"{result['tokens_per_second']:,.0f} tokens/s with {options.policy}")


if __name__ == "__main__":
    main()
