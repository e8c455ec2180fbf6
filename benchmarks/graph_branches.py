"""Graphs of many ranks of one process on one card: with which branches do they stall?

    python benchmarks/graph_branches.py            # a card whose SMs can be split; two minutes

Every rank has a graph; all are replayed at once and wait for each other on the card. A graph with
branches (work aside, joined later) takes several queues of the card. Where two ranks share a queue,
one that waits can stand before the one it waits for. What is tried:

    meet    nothing but meetings: on the main stream of each layer, and aside
    layer   layers of a model, forward and backward, whose weights move aside
    large   the same with experts of Qwen3-235B
    model   the model of `train_gpu.py`: the same, with attention and all the rest

with a number of layers, of streams aside (0: all on the main one), and of queues
(CUDA_DEVICE_MAX_CONNECTIONS, which CUDA reads once: each number is a process of its own). One host
thread launches all graphs, one after the other, or each has a thread of its own. The longest launch
tells whether the host was held up.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from load_cases import Shape
from train_gpu import ModelRank, Options
from world import Card, Given, Partition, Rank, given_layer, split

RANKS, SMS = 8, 16
TIMEOUT = 1.5  # seconds after which a meeting is given up
REPLAYS = 5
SMALL = Shape(hidden=256, ffn=128, experts=16, top_k=2, tokens=256)
LARGE = Shape(hidden=4096, ffn=1536, experts=128, top_k=8, tokens=2048)


class MeetRank(Rank):
    """A rank whose layers are meetings: one aside, begun before the one on the main stream."""

    def __init__(self, number: int, partition: Partition) -> None:
        super().__init__(number, partition)
        self.partition, self.layers = partition, 0
        self.board: Any = None
        self.aside: list[torch.cuda.Stream] = []

    def become(self, peers: Any, layers: int, branches: int) -> None:
        from ultraep.backends.triton.board import Board

        self.graph = None
        self.layers = layers
        self.board = Board(peers, slots=1, buffers=1, timeout=TIMEOUT)
        self.aside = [self.partition.stream() for _ in range(branches)]

    def step(self) -> None:
        main = torch.cuda.current_stream()
        for _ in range(self.layers):
            for stream, meeting in zip(self.aside, ("loads", "gradients"), strict=False):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    self.board.meet(meeting)
            self.board.meet("rows")
            for stream in self.aside:
                main.wait_stream(stream)

    def check(self) -> None:
        self.board.check()


class LayersRank(Rank):
    """A rank with several layers; a step is forward and backward of all of them."""

    shape = SMALL

    def __init__(self, number: int, partition: Partition) -> None:
        super().__init__(number, partition)
        self.partition = partition
        tokens, top_k = self.shape.tokens, self.shape.top_k
        self.x = torch.randn(tokens, self.shape.hidden, device="cuda", dtype=torch.bfloat16)
        gates = torch.full((tokens, top_k), 1 / top_k, device="cuda", requires_grad=True)
        drawn = torch.rand(tokens, top_k, device="cuda") ** 1.5  # the first experts are liked
        self.router = Given((drawn * self.shape.experts).int(), gates)

    def become(self, peers: Any, layers: int, branches: int) -> None:
        self.graph = None
        aside = self.partition.stream() if branches else self.stream
        shape, made = self.shape, partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.join(peers, aside, experts=shape.experts, tokens=shape.tokens, timeout=TIMEOUT)
        homes = shape.experts // RANKS
        self.layers = [
            given_layer(
                self.balancer,
                self.router,
                {
                    "gate_up_proj": 0.01 * made(homes, 2 * shape.ffn, shape.hidden),
                    "down_proj": 0.01 * made(homes, shape.hidden, shape.ffn),
                },
            )
            for _ in range(layers)
        ]
        for layer in self.layers:
            self.balancer.prepare(self.router.ids, self.x, layer.experts.bundle)

    def step(self) -> None:
        y = self.x.clone().requires_grad_()
        for layer in self.layers:
            y = layer(y)
        y.sum().backward()

    def check(self) -> None:
        self.balancer.check()


class LargeLayersRank(LayersRank):
    """The same with experts of Qwen3-235B, whose kernels fill all multiprocessors of a rank."""

    shape = LARGE


class TrainedRank(Rank):
    """A rank of the model that `train_gpu.py` trains."""

    def __init__(self, number: int, partition: Partition) -> None:
        super().__init__(number, partition)
        self.partition = partition
        self.inner: Any = None

    def become(self, peers: Any, layers: int, branches: int) -> None:
        self.graph = None
        aside = self.partition.stream() if branches else None
        options = Options(layers=layers, ranks=RANKS, sms=SMS)
        inner = self.inner = ModelRank(self.number, options, self.partition, peers, aside)
        self.stream, self.balancer = inner.stream, inner.balancer

    def capture(self) -> None:
        self.inner.warm()
        self.inner.capture()
        self.graph = self.inner.graph

    def check(self) -> None:
        self.balancer.check()


KINDS: dict[str, type[Any]] = {
    "meet": MeetRank,
    "layer": LayersRank,
    "large": LargeLayersRank,
    "model": TrainedRank,
}


def attempt(
    ranks: Sequence[Any],
    layers: int,
    branches: int,
    *,
    upload: bool,
    threads: ThreadPoolExecutor | None,
) -> str:
    """Whether so many replays came to their end."""
    from ultraep.errors import UltraEPError
    from ultraep.runtime.mapped.peers import LocalPeers

    group = LocalPeers(RANKS)
    for rank in ranks:
        rank.become(group.of(rank.number), layers, branches)
    torch.cuda.synchronize()
    card = Card(ranks)
    card.capture()
    if upload:
        for rank in ranks:
            upload_graph(rank)
        torch.cuda.synchronize()
    launches = []
    for number in range(REPLAYS):
        launches.append(replay(ranks, threads))
        torch.cuda.synchronize()
        try:
            for rank in ranks:
                rank.check()
        except UltraEPError as error:
            return f"launch {launches[-1] * 1e3:7.1f} ms  stalled in replay {number + 1}: {error}"
    return f"launch {max(launches) * 1e3:7.1f} ms  ran {REPLAYS} times"


def replay(ranks: Sequence[Any], threads: ThreadPoolExecutor | None) -> float:
    """All graphs at once; seconds of the longest launch."""
    main, ready = torch.cuda.current_stream(), torch.cuda.Event()
    ready.record(main)

    def launch(rank: Any) -> float:
        begin = time.perf_counter()
        with torch.cuda.stream(rank.stream):
            rank.stream.wait_event(ready)
            rank.graph.replay()
        return time.perf_counter() - begin

    return max(map(launch, ranks) if threads is None else threads.map(launch, ranks))


def upload_graph(rank: Rank) -> None:
    """Have the driver take for a graph, before anybody waits, what its first replay would."""
    from cuda.bindings import runtime

    execution = rank.graph.raw_cuda_graph_exec()
    (code,) = runtime.cudaGraphUpload(
        runtime.cudaGraphExec_t(execution), runtime.cudaStream_t(rank.stream.cuda_stream)
    )
    if int(code):
        raise SystemExit(f"cudaGraphUpload: {code!r}")


def measure_once(module: Any) -> None:
    """Boards ask how long a poll takes, each for itself; here one answer does for all."""
    module.polls_per_second = cache(module.polls_per_second)


def on_card(
    kind: str, layers: Sequence[int], branches: Sequence[int], *, upload: bool, threads: bool
) -> None:
    """All attempts of one process."""
    import ultraep.backends.triton.board as boards

    measure_once(boards)
    ranks = [KINDS[kind](n, part) for n, part in enumerate(split(RANKS, SMS))]
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    for number, aside in product(layers, branches):
        pool = ThreadPoolExecutor(RANKS) if threads else None
        found = attempt(ranks, number, aside, upload=upload, threads=pool)
        print(
            f"{kind:5s}  queues {queues:>7s}  layers {number:4d}  streams aside {aside}  "
            f"{'uploaded  ' * upload}{'threads  ' * threads}{found}",
            flush=True,
        )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kind", choices=KINDS, help="of this process; else all are started")
    parser.add_argument("--layers", type=numbers, default=[1, 2, 4, 8], metavar="1,2")
    parser.add_argument("--branches", type=numbers, default=[0, 1, 2], metavar="0,1")
    parser.add_argument("--queues", type=numbers, default=[8, 32], metavar="8,32")
    parser.add_argument("--upload", action="store_true", help="graphs, before the first replay")
    parser.add_argument("--threads", action="store_true", help="one for the graph of each rank")
    options = parser.parse_args()
    if options.kind:
        how = {"upload": options.upload, "threads": options.threads}
        on_card(options.kind, options.layers, options.branches, **how)
        return
    run: Callable[..., Any] = subprocess.run
    for kind, queues in product(KINDS, options.queues):
        arguments = [sys.executable, __file__, "--kind", kind]
        for name in ("layers", "branches"):
            arguments += [f"--{name}", ",".join(map(str, getattr(options, name)))]
        environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
        flags = [f"--{name}" for name in ("upload", "threads") if getattr(options, name)]
        run([*arguments, *flags], env=environment, check=False)


if __name__ == "__main__":
    main()
