"""Where benchmarks run ranks: on parts of one card, driven by one thread, or in processes.

Green contexts cut a card into small ones, each with its own multiprocessors and streams: a rank
that has more to do than others then really takes longer, as on several cards. Memory, its bandwidth
and the second-level cache stay shared. Every rank has a graph of its step; all graphs run at the
same time and wait for each other through the memory that they share.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import Call
from torch import nn
from torch.multiprocessing.spawn import start_processes

import ultraep
from ultraep.experts import Experts
from ultraep.runtime.settings import DeviceShare

# Names of stages in the tables of a layer on one card, older than those of traces.
STAGE_NAMES = {
    "loads": "1 loads",
    "plan": "2 plan",
    "verify": "2 plan",
    "replicate": "3 replicate, waited for",
    "reroute": "4 reroute",
    "dispatch": "to slots",
    "experts": "6 experts",
    "combine": "to tokens",
    "combine back": "backward to slots",
    "weights again": "backward 3 replicate, waited for",
    "experts back": "backward 6 experts",
    "reduce": "backward 8 reduce, waited for",
    "dispatch back": "backward to tokens",
}


@dataclass
class Partition:
    """Some multiprocessors of the card."""

    sms: int
    context: Any

    def stream(self, priority: int = 0) -> torch.cuda.Stream:
        """A new stream whose kernels run on these multiprocessors only."""
        from cuda.bindings import driver

        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        made = _ok(driver.cuGreenCtxStreamCreate(self.context, flags, priority))
        return torch.cuda.ExternalStream(int(made))


def split(count: int, sms: int) -> list[Partition]:
    """The card cut into `count` partitions of `sms` multiprocessors."""
    from cuda.bindings import driver

    torch.cuda.init()
    torch.zeros(1, device="cuda")  # the primary context must be there
    device = _ok(driver.cuDeviceGet(torch.cuda.current_device()))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _ok(driver.cuDeviceGetDevResource(device, kind))
    groups, made, _ = _ok(driver.cuDevSmResourceSplitByCount(count, whole, 0, sms))
    if made < count:
        raise SystemExit(f"the card gives {made} partitions of {sms}, wanted {count}")
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    found = []
    for group in groups[:count]:
        description = _ok(driver.cuDevResourceGenerateDesc([group], 1))
        context = _ok(driver.cuGreenCtxCreate(description, device, flags))
        found.append(Partition(int(group.sm.smCount), context))
    return found


def _ok(result: Any) -> Any:
    """What a call of the driver returned, behind its code."""
    code, *values = result
    if int(code) != 0:
        raise SystemExit(f"CUDA driver: {code!r}")
    return values[0] if len(values) == 1 else values


def graph_on(stream: torch.cuda.Stream, call: Call) -> torch.cuda.CUDAGraph:
    """A graph of one call. Nothing runs yet, so nobody waits for another."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        call()
    return graph


def together(calls: Sequence[Call], streams: Sequence[torch.cuda.Stream]) -> None:
    """All calls, each on its stream; then the current stream waits for the last of them."""
    main = torch.cuda.current_stream()
    for stream, call in zip(streams, calls, strict=True):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            call()
    for stream in streams:
        main.wait_stream(stream)


class Rank:
    """One rank of a card: its part of it, its balancer, and a graph of its step."""

    def __init__(self, number: int, partition: Partition) -> None:
        self.number, self.sms, self.stream = number, partition.sms, partition.stream()
        self.balancer: Any = None
        self.graph: Any = None

    def join(self, peers: Any, aside: torch.cuda.Stream, **options: Any) -> None:
        """Become a rank of a group; weights move on the stream aside."""
        share = DeviceShare(sms=self.sms, stream=aside)
        self.balancer = ultraep.Balancer(peers=peers, data_plane="mapped", share=share, **options)

    def step(self) -> None:
        """What the graph holds; of a subclass."""
        raise NotImplementedError

    def capture(self) -> None:
        self.graph = None
        self.graph = graph_on(self.stream, self.step)


class Card:
    """All ranks of a card."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = ranks

    def capture(self) -> None:
        for rank in self.ranks:
            rank.capture()
        torch.cuda.synchronize()

    def replay(self) -> None:
        """One step of all ranks at once."""
        together([rank.graph.replay for rank in self.ranks], [rank.stream for rank in self.ranks])

    def check(self) -> None:
        """Raise what went wrong on the device; waits for it."""
        torch.cuda.synchronize()
        for rank in self.ranks:
            rank.balancer.check()


class StageClock:
    """An observer that leaves stamps of a clock between the stages, also in a graph.

    What was done since the last stamp belongs to the innermost stage that ends or is interrupted.
    stamp: writes the time into place n of `stamps`.
    """

    def __init__(self, stamps: torch.Tensor, stamp: Callable[[torch.Tensor, int], object]) -> None:
        self._stamps, self._stamp = stamps, stamp
        self._stages: list[str] = []
        self._open: list[str] = []

    @classmethod
    def on_device(cls) -> StageClock:
        """By the clock of the GPU, in nanoseconds; a replay writes the stamps anew."""
        from stamp import write_time  # triton, only where it is used

        stamps = torch.zeros(256, dtype=torch.int64, device="cuda")
        return cls(stamps, lambda into, index: write_time[(1,)](into, index, num_warps=1))

    def restart(self) -> None:
        """Forget all stamps; what follows begins now."""
        self._stages.clear()
        self.mark("begin")

    def mark(self, stage: str) -> None:
        """What was done since the last mark belongs to this stage."""
        self._stamp(self._stamps, len(self._stages))
        self._stages.append(stage)

    def begin(self, stage: str, _: Any) -> None:
        if self._open:
            self.mark(self._open[-1])
        self._open.append(stage)

    def end(self, stage: str, _: Any) -> None:
        self.mark(stage)
        self._open.pop()

    def planned(self, _: Any, plan: Any) -> None:
        """Nothing: plans take no time by themselves."""

    def sent(self, _: Any, what: str, nbytes: int, copies: object) -> None:
        """Nothing: bytes take no time by themselves."""

    def times(self) -> dict[str, float]:
        """Milliseconds of every stage, in the order of their first stamps."""
        found: dict[str, float] = defaultdict(float)
        spans = pairwise(self._stamps.tolist())
        for stage, (begin, end) in zip(self._stages[1:], spans, strict=False):
            found[STAGE_NAMES.get(stage, stage)] += (end - begin) / 1e6
        return dict(found)


class Given(nn.Module):
    """A router whose choices and gates are given."""

    def __init__(self, ids: torch.Tensor | None = None, gates: torch.Tensor | None = None) -> None:
        super().__init__()
        self.ids, self.gates = ids, gates

    def forward(self, _: torch.Tensor) -> tuple[Any, Any]:
        return self.ids, self.gates


def given_layer(
    balancer: ultraep.Balancer,
    router: nn.Module,
    weights: Mapping[str, torch.Tensor],
    quantised: str | None = None,
) -> ultraep.BalancedMoE:
    """A layer of SwiGLU experts whose weights are given: nothing is drawn."""
    homes = balancer.topology.home_experts(balancer.rank).tolist()
    experts = Experts(1, 1, homes, quantised=quantised)
    for name, weight in weights.items():
        is_leaf = isinstance(weight, nn.Parameter)
        setattr(experts, name, weight if is_leaf else nn.Parameter(weight))
    return ultraep.BalancedMoE(router, experts, balancer=balancer)


def on_ranks(ranks: int, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(rank, *args)` gives on rank 0 of so many processes, joined by gloo.

    Each has a core, where there are enough, and one thread. Plain values and tensors come back.
    On Linux they are forked from a process that has imported what this program imports.
    """
    method = "forkserver" if sys.platform == "linux" else "spawn"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # it hears of no other path
    multiprocessing.set_forkserver_preload([Path(sys.argv[0]).stem])
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_on_rank, (ranks, folder, work, args), ranks, start_method=method)
        return torch.load(f"{folder}/found", weights_only=True)


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
    found = work(rank, *args)
    dist.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/found")
