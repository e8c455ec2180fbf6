"""Layers with fixed routing, ranks in processes, and the timing and comparison of their steps.

Shapes: T tokens of a rank, K experts per token.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from harness import Metric, Mismatch, Values
from load_cases import Shape, ids_with
from timing import Call, nothing, print_progress
from torch import nn
from torch.multiprocessing.spawn import ProcessException, start_processes

import ultraep
from ultraep import Plan
from ultraep.arrays import IntArray
from ultraep.experts import Experts

PLAIN, FORCED = "unmodified", "forced balance"

STEP = Metric("step_time_p50", "ms", "ms", ".2f")
RATE = Metric("tokens_per_second", "tokens/s", "tokens/s", ".0f")
GAIN = Metric("gain_over_none", "ratio", "over none", ".3f")
BEFORE = Metric("imbalance_before", "max/mean", "before", ".3f")
AFTER = Metric("imbalance_after", "max/mean", "after", ".3f")
COPIES = Metric("copies", "copies", "replicas", ".1f")
LESS = Metric("busiest_processor_gain_over_none", "ratio", "cpu gain", ".3f")

Spent = tuple[float, float]  # wall and CPU seconds
Case = TypeVar("Case")
POLL = 0.2  # seconds between looks for results


class FixedRouter(nn.Module):
    """A router with fixed ids and gates."""

    def __init__(self, ids: torch.Tensor | None = None, gates: torch.Tensor | None = None) -> None:
        super().__init__()
        self.ids, self.gates = ids, gates

    def forward(self, _: torch.Tensor) -> tuple[Any, Any]:
        return self.ids, self.gates


def layer_with_weights(
    balancer: ultraep.Balancer,
    router: nn.Module,
    weights: Mapping[str, torch.Tensor],
    quantised: str | None = None,
) -> ultraep.BalancedMoE:
    """A layer of SwiGLU experts with these weights."""
    homes = balancer.topology.home_experts(balancer.rank).tolist()
    experts = Experts(1, 1, homes, quantised=quantised)
    for name, weight in weights.items():
        is_leaf = isinstance(weight, nn.Parameter)
        setattr(experts, name, weight if is_leaf else nn.Parameter(weight))
    return ultraep.BalancedMoE(router, experts, balancer=balancer)


class Variants:
    """Layers of one rank with the same weights, tokens and routing, and a balancer per variant.

    forward: without backward.   quantised: format of frozen experts.
    """

    def __init__(
        self,
        shape: Shape,
        rank: int,
        device: torch.device,
        *,
        forward: bool = False,
        quantised: str | None = None,
    ) -> None:
        self.shape, self.rank, self.device = shape, rank, device
        self.forward, self.quantised = forward, quantised
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        draw = torch.Generator(device=device).manual_seed(rank)
        options: dict[str, Any] = {"generator": draw, "device": device, "dtype": self.dtype}
        size = shape.tokens, shape.hidden
        self.x = torch.randn(size, **options).requires_grad_()
        self.dy = torch.randn(size, **options)
        homes = shape.experts // shape.ranks
        home_experts = list(range(rank * homes, (rank + 1) * homes))
        drawn = drawn_weights(shape, home_experts, device, self.dtype)
        self.weights = {name: torch.nn.Parameter(weight) for name, weight in drawn.items()}
        self.router = FixedRouter()
        self.layers: dict[str, list[ultraep.BalancedMoE]] = {}

    def add(self, name: str, balancer: ultraep.Balancer, layers: int = 1) -> None:
        """Add layers with this balancer."""
        make = partial(layer_with_weights, balancer, self.router, self.weights, self.quantised)
        self.layers[name] = [make() for _ in range(layers)]
        if self.quantised is not None:
            for layer in self.layers[name]:
                layer.experts.freeze()

    def remove(self, name: str) -> None:
        if name in self.layers:
            self.layers.pop(name)[0].balancer.close()

    def route(self, loads_RE: IntArray) -> None:
        """Choose experts with these loads for the tokens of this rank."""
        ids = ids_with(loads_RE[self.rank], self.shape, self.rank)
        gates = torch.rand(ids.shape, generator=torch.Generator().manual_seed(self.rank))
        self.router.ids = ids.to(self.device)
        self.router.gates = gates.to(self.device, self.dtype).requires_grad_()

    def forget(self) -> None:
        """Drop all gradients."""
        assert self.router.gates is not None
        for tensor in (self.x, self.router.gates, *self.weights.values()):
            tensor.grad = None

    def step(self, name: str) -> torch.Tensor:
        """Run all layers of a variant on the same tokens, then backward."""
        self.forget()
        with torch.set_grad_enabled(not self.forward):
            outputs: list[torch.Tensor] = [layer(self.x) for layer in self.layers[name]]
        if not self.forward:
            torch.autograd.backward(outputs, [self.dy] * len(outputs))
        return outputs[0]

    def check(self, names: Sequence[str]) -> None:
        """Raise if outputs or gradients of a variant differ from the first."""
        check_variants(names, self.step, self.x, self.weights)

    def plan(self, name: str) -> Plan:
        """The last plan of a variant."""
        plan = self.layers[name][0].last_plan
        assert plan is not None
        return plan.to_host()

    def close(self) -> None:
        for name in list(self.layers):
            self.remove(name)


def drawn_weights(
    shape: Shape, home_experts: list[int], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Random weights, seeded by expert, drawn on the device, which is fast."""
    homes = len(home_experts)
    shapes = {"gate_up_proj": (2 * shape.ffn, shape.hidden), "down_proj": (shape.hidden, shape.ffn)}
    weights = {
        n: torch.empty(homes, *size, device=device, dtype=dtype) for n, size in shapes.items()
    }
    for index, expert in enumerate(home_experts):
        generator = torch.Generator(device=device).manual_seed(1_000_003 + expert)
        for stack in weights.values():
            bound = stack.shape[-1] ** -0.5
            stack[index].uniform_(-bound, bound, generator=generator)
    return weights


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """Run `work(rank, *args)` in this many processes with gloo; return the result of rank 0."""
    [result] = results_of(ranks, work, *args)
    return result


def results_of(ranks: int, work: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Yield the results of rank 0 as they come; `work` may be a generator.

    Each process has one thread and, if there are enough, its own core. Results are plain values
    and tensors. On Linux the processes are forked from one that has imported this program.
    """
    method = "forkserver" if sys.platform == "linux" else "spawn"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # the fork server needs it
    multiprocessing.set_forkserver_preload([Path(sys.argv[0]).stem])
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = (ranks, folder, work, args)
        context = start_processes(_on_rank, of_ranks, ranks, join=False, start_method=method)
        done, count, failure = False, 0, None
        try:
            while not done and failure is None:
                try:
                    done = context.join(POLL)
                except ProcessException as error:
                    failure = error
                while (path := Path(folder, str(count))).exists():
                    yield torch.load(path, weights_only=True)
                    count += 1
        finally:
            for process in context.processes:
                process.kill()
        if failure is not None:
            raise failure


def results_of_cases(
    ranks: int, work: Callable[..., Any], cases: Sequence[Case], *args: Any
) -> Iterator[tuple[Case, Any]]:
    """Yield every case with the result that `work(rank, cases, *args)` yields for it.

    The result of a failed case is None; new processes go on with the next case.
    """
    rest = list(cases)
    while rest:
        try:
            for result in results_of(ranks, work, tuple(rest), *args):
                yield rest.pop(0), result
        except ProcessException as error:
            print_progress(f"{rest[0]} failed: {error}")
            yield rest.pop(0), None


def _on_rank(
    rank: int, ranks: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    returned = work(rank, *args)
    for number, result in enumerate(returned if isinstance(returned, Iterator) else [returned]):
        if rank == 0:
            torch.save(result, f"{folder}/unfinished")
            os.rename(f"{folder}/unfinished", f"{folder}/{number}")
    dist.destroy_process_group()


def step_values(shape: Shape, ms: float, none_ms: float) -> Values:
    """Milliseconds per step, tokens per second of all ranks, and the gain over no balancing."""
    return {STEP: ms, RATE: shape.ranks * shape.tokens / ms * 1e3, GAIN: none_ms / ms}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference, relative to the norm of the expected tensor."""
    if torch.equal(got, want):  # also zeros: gradients of a rank without rows
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def check_variants(
    names: Sequence[str],
    step: Callable[[str], torch.Tensor],
    x: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Raise if outputs or gradients of a variant differ from the first.

    step: runs a variant and returns its outputs; x: the tokens, whose gradients it computes.
    """

    def results_of(name: str) -> dict[str, torch.Tensor]:
        results = {"outputs": step(name).detach(), "gradients of tokens": x.grad}
        results |= {f"gradients of {n}": weight.grad for n, weight in weights.items()}
        return {what: tensor.clone() for what, tensor in results.items() if tensor is not None}

    wanted = results_of(names[0])
    for name in names[1:]:
        for what, tensor in results_of(name).items():
            check_close(f"{what} of {name}", tensor, wanted[what])


def check_close(what: str, got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    """Raise if two tensors differ by more than the precision of their dtype."""
    assert got is not None, what
    assert want is not None, what
    limit, error = 1e-4 if got.dtype.itemsize >= 4 else 2e-2, distance(got, want)
    if not error <= limit:
        raise Mismatch(f"{what}: relative error {error:.2g}, the limit is {limit}")


def slowest(step: Call, count: int, device: torch.device) -> Spent:
    """Wall and CPU seconds per step of `count` steps in a row, the maximum over all ranks."""
    wait = torch.cuda.synchronize if device.type == "cuda" else nothing
    wait()
    dist.barrier()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    wait()
    spent = torch.tensor([time.perf_counter() - begin, time.process_time() - used])
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    elapsed, busy = (spent / count).tolist()
    return elapsed, busy


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds: the clock of a shared machine drifts less within one round."""
    return median(time / other for time, other in zip(times, others, strict=True))


def qwen3_config(shape: Shape, **sizes: int) -> Any:
    """The configuration of a Qwen3-MoE of transformers, with grouped products."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.ffn,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
        attn_implementation="sdpa",
        use_cache=False,
        **sizes,
    )
