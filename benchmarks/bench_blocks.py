"""A MoE block with balancing beside the block that it replaces, by tokens per rank.

    python benchmarks/bench_blocks.py                       # one rank, then eight processes; a GPU
    python benchmarks/bench_blocks.py --only torch --ranks 1
    python benchmarks/bench_blocks.py --toy                 # CPU processes, tiny

Every rank is a process; eight processes share the GPU through CUDA MPS. `torch` compares our layer
with plain torch layers, `transformers` a MoE block of Qwen3-MoE before and after `balance`,
`megatron_te` a MoELayer of Megatron-Core with TEGroupedMLP before and after `balanced`. A replaced
block holds all experts on every rank and sends nothing, which is the fastest it can be; ours holds
a share of the experts and exchanges rows, with default settings. All experts are equally likely, so
there is nothing to balance.

Outputs and gradients of tokens are compared at every size. Blocks take turns; `forward` has no
gradients, `step` includes backward. The slowest rank counts, and `speed` is the median ratio
within a round. The torch layer is the faster one of two.

Shapes: T tokens of a rank, K experts per token, D model width.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench_frameworks import CORES, QWEN3_30B, TOY, obstacle, prepared
from bench_ranks_gpu import numbers_of
from harness import Bench, Line, Metric, comma_list, options_parser
from layers import (
    PLAIN,
    FixedRouter,
    Spent,
    check_close,
    drawn_weights,
    layer_with_weights,
    median_ratio,
    qwen3_config,
    results_of,
    slowest,
)
from load_cases import Shape, draw, ids_with
from mps import rank_environment, report_of_ranks
from plain_layers import LAYERS
from timing import Host, free, in_turns, print_progress
from torch import nn
from whole_models import Choices, Size

from ultraep import Balancer
from ultraep.workload import Load

OURS, EVEN = "ultraep", Load("random even")
LIBRARIES = ("torch", "transformers", "megatron_te")
REPLACED_MS = Metric("replaced_ms", "ms", "replaced ms", ".3f")
OURS_MS = Metric("step_time_p50", "ms", "ours ms", ".3f")
SPEED = Metric("speed_over_replaced", "ratio", "speed", ".3f")
CALLS = 10  # in a row, of small blocks
WARMUP = 2

Block = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Scale:
    """What one run measures."""

    shape: Size
    tokens: tuple[int, ...]
    rounds: int = 15


ON_GPU = Scale(QWEN3_30B, tokens=(128, 512, 2048, 8192, 16384))
ON_CORES = Scale(CORES, tokens=(16, 128, 1024))
TINY = Scale(TOY, tokens=(8, 32), rounds=1)


def torch_blocks(shape: Shape, rank: int, device: torch.device, choices: Choices) -> Any:
    """Plain torch layers of all experts, and our layer of the home experts with equal weights."""
    dtype = dtype_of(device)
    router = ChosenRouter(choices)
    every = drawn_weights(shape, list(range(shape.experts)), device, dtype)
    blocks: dict[str, nn.Module] = {name: make(router, every) for name, make in LAYERS.items()}
    balancer = Balancer(dist.group.WORLD, experts=shape.experts, timeout=120.0)
    homes = balancer.topology.home_experts(rank).tolist()
    mine = {name: weight[homes].clone() for name, weight in every.items()}
    return blocks | {OURS: layer_with_weights(balancer, router, mine)}


class ChosenRouter(FixedRouter):
    """The experts of `choices`, with gates that depend on the tokens."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self._choices = choices

    def forward(self, x: torch.Tensor) -> tuple[Any, Any]:
        ids = self._choices.ids_TK
        assert ids is not None
        return ids, x[:, : ids.shape[1]].softmax(dim=-1)


def transformers_blocks(shape: Shape, _: int, device: torch.device, choices: Choices) -> Any:
    """The block of a layer of Qwen3-MoE, router and experts, and the same balanced."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    from whole_transformers import ChosenGate

    from ultraep.integrations.transformers import balance

    with torch.device("meta"):
        empty = Qwen3MoeSparseMoeBlock(qwen3_config(shape)).to(dtype_of(device))
    block = empty.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)  # equal on all ranks
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
    block.gate = ChosenGate(block.gate, choices)
    balanced = deepcopy(block)
    balanced.gate = block.gate  # `choices` must stay the same object
    balance(balanced, timeout=120.0)
    return {PLAIN: Rows(block), OURS: Rows(balanced)}


def megatron_te_blocks(shape: Size, rank: int, device: torch.device, choices: Choices) -> Any:
    """The MoELayer of a GPT with TEGroupedMLP, and the same balanced, with equal weights."""
    from megatron.core import parallel_state
    from whole_megatron import BF16, model_of

    blocks = {}
    for name, ranks in ((PLAIN, 1), (OURS, shape.ranks)):
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        model = model_of(replace(shape, ranks=ranks, layers=1), device, name, choices, BF16)
        blocks[name] = model.decoder.layers[0].mlp
    whole = blocks[PLAIN].state_dict()
    homes = shape.experts // shape.ranks
    with torch.no_grad():
        for name, parameter in blocks[OURS].named_parameters():
            stem, weight, index = name.rpartition(".weight")
            if index:  # of an expert
                name = f"{stem}{weight}{int(index) + rank * homes}"
            parameter.copy_(whole[name])
    return {name: Rows(block, returns_bias=True) for name, block in blocks.items()}


class Rows(nn.Module):
    """A block of `[B, S, D]` tokens as a block of `[T, D]` tokens; MoELayer also returns a bias."""

    def __init__(self, block: nn.Module, *, returns_bias: bool = False) -> None:
        super().__init__()
        self.block, self._returns_bias = block, returns_bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.block(x[None])
        outputs = outputs[0] if self._returns_bias else outputs
        y: torch.Tensor = outputs.view(x.shape)
        return y


BLOCKS = {
    "torch": torch_blocks,
    "transformers": transformers_blocks,
    "megatron_te": megatron_te_blocks,
}


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def on_rank(rank: int, library: str, scale: Scale, cuda: bool) -> Iterator[dict[str, Any]]:
    """One process: compare and time the blocks at every size."""
    with prepared(library, cuda=cuda) as device:
        choices = Choices()
        blocks = BLOCKS[library](scale.shape, rank, device, choices)
        free()
        warm = scale.tokens[:1]  # the first size is measured twice, and only the second time counts
        for index, tokens in enumerate(warm + scale.tokens):
            shape = replace(scale.shape, tokens=tokens)
            ids = ids_with(draw(EVEN, shape)[rank], shape, rank)
            choices.ids_TK = ids.long().to(device)
            generator = torch.Generator(device=device).manual_seed(rank)
            options: Any = {"generator": generator, "device": device, "dtype": dtype_of(device)}
            x, dy = (torch.randn(tokens, shape.hidden, **options) for _ in range(2))
            times = measured(blocks, x.requires_grad_(), dy, scale.rounds)
            if index:
                yield times


def measured(
    blocks: dict[str, nn.Module], x: torch.Tensor, dy: torch.Tensor, rounds: int
) -> dict[str, Any]:
    """Seconds of forward passes and steps of every block, round by round."""
    results = {name: outputs_and_gradients(block, x, dy) for name, block in blocks.items()}
    wanted = next(iter(results.values()))
    for name, (y, gradient) in results.items():
        check_close(f"outputs of {name}", y, wanted[0])
        check_close(f"gradients of tokens of {name}", gradient, wanted[1])
    del results, wanted
    calls = min(CALLS, 1 + 8192 // len(x))
    times: dict[str, Any] = {}
    for work, call in (("forward", forward), ("step", step)):

        def spent(name: str, call: Any = call) -> Spent:
            return slowest(partial(call, blocks[name], x, dy), calls, x.device)

        of_rounds = in_turns(list(blocks), rounds, spent, warmup=WARMUP)
        times[work] = {name: [wall for wall, _ in values] for name, values in of_rounds.items()}
    return times


def forward(block: Block, x: torch.Tensor, _: torch.Tensor) -> None:
    with torch.no_grad():
        block(x)


def step(block: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    x.grad = None
    block.zero_grad(set_to_none=True)
    block(x).backward(dy)


def outputs_and_gradients(block: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Any:
    """Outputs and gradients of tokens."""
    x.grad = None
    block.zero_grad(set_to_none=True)
    y = block(x)
    outputs = y.detach().clone()  # backward may overwrite them
    y.backward(dy)
    assert x.grad is not None
    return outputs, x.grad.clone()


def line_of(ranks: int, tokens: int, work: str, times: dict[str, list[float]]) -> Line:
    ours = times[OURS]
    replaced = min((times[name] for name in times if name != OURS), key=median)
    values = {
        REPLACED_MS: 1e3 * median(replaced),
        OURS_MS: 1e3 * median(ours),
        SPEED: median_ratio(replaced, ours),
    }
    return Line({"ranks": ranks, "work": work, "tokens": tokens}, values)


def run(library: str, bench: Bench, *, cuda: bool) -> None:
    lines = []
    for ranks in bench.options.ranks:
        os.environ |= rank_environment(ranks) if cuda else {}  # one rank has the whole card
        scale: Scale = replace(bench.scale, shape=replace(bench.scale.shape, ranks=ranks))
        measured_sizes = results_of(ranks, on_rank, library, scale, cuda)
        for tokens, times in zip(scale.tokens, measured_sizes, strict=True):
            lines += [line_of(ranks, tokens, work, values) for work, values in times.items()]
            shown = ", ".join(
                f"{line.case['work']} {line.values[SPEED]:.2f}x" for line in lines[-2:]
            )
            print_progress(f"{library}, {ranks} ranks, {tokens} tokens: {shown}")
    lines.sort(key=lambda line: (line.case["ranks"], line.case["work"]))
    bench.table(f"{library}: {bench.scale.shape.about}, random even routing", lines)


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    only = comma_list(LIBRARIES)
    parser.add_argument("--only", type=only, metavar="A,B", help=", ".join(LIBRARIES))
    parser.add_argument(
        "--ranks", type=numbers_of(int), metavar="A,B", help="1,8 on a GPU, else 1,2"
    )
    options = parser.parse_args(argv[1:])
    cuda = torch.cuda.is_available() and not options.toy
    options.ranks = options.ranks or ((1, 8) if cuda else (1, 2))
    scale = ON_GPU if cuda else ON_CORES
    scale = TINY if options.toy else replace(scale, rounds=7) if options.quick else scale
    names = options.only or LIBRARIES
    obstacles = {name: obstacle(name) for name in names if name != "torch"}
    with report_of_ranks("blocks", argv, max(options.ranks), cuda=cuda) as report:
        for name, reason in obstacles.items():
            if reason:
                report.note(f"{name} cannot run here: {reason}")
        bench = Bench(report, scale, Host(name=""), options)
        sections = {name: partial(run, name, cuda=cuda) for name in LIBRARIES}
        bench.run(sections, [name for name in names if not obstacles.get(name)])


if __name__ == "__main__":
    main(sys.argv)
