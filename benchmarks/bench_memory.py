"""Peak memory of a rank in training, unbalanced and balanced, with default settings.

    python benchmarks/bench_memory.py            # needs a GPU and CUDA MPS
    python benchmarks/bench_memory.py --toy      # two CPU processes, tiny, for CI

Every process is a rank (`mps.py`). A step runs several layers forward, then all of them backward,
so the tensors that backward needs exist once per layer. The layers have the same weights, which do
not count. Bytes of the rank that needs most:

    shared   memory that ranks map: rows, spare slots and their gradients; once for all layers
    step     the most that a step allocates; on a CPU, the tensors that autograd saves

16 layers do not fit on one GPU that eight ranks share; their peak is computed from the measured
peaks of 1 and 8 layers, between which it grows linearly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Line, Metric, options_parser
from layers import STEP, FixedRouter, drawn_weights, layer_with_weights, on_ranks, slowest
from load_cases import HotRank, Shape, even, ids_with
from mps import device_of_rank, report_of_ranks
from timing import free, on_gpu

import ultraep
from ultraep.arrays import IntArray

SKEWS = (1.0, 1.5, 3.0)
POLICIES = ("none", "ultraep")
SHARED = Metric("shared_memory", "MB", "shared MB", ".1f")
STEP_MEMORY = Metric("peak_of_a_step", "MB", "step MB", ".1f")
PEAK = Metric("peak_but_weights", "MB", "all MB", ".1f")
OVER = Metric("share_of_none", "share", "of none", ".3f")
STEPS = 3  # timed
MANY = 16  # layers, computed

QWEN = Shape(hidden=4096, ffn=1536, experts=128, top_k=8, tokens=8192, ranks=8)
TOY = Shape(hidden=64, ffn=32, experts=16, top_k=2, tokens=64, ranks=2)


def loads_of_skew(size: Shape, skew: float) -> IntArray:
    return even(size) if skew == 1 else HotRank(skew).draw(size)


class Model:
    """Some layers of one rank with the same weights, tokens and routes."""

    def __init__(self, rank: int, size: Shape, skew: float, policy: str, layers: int) -> None:
        cuda = torch.cuda.is_available()
        self.device = device_of_rank(cuda=cuda)
        dtype = torch.bfloat16 if cuda else torch.float32
        self.balancer = ultraep.Balancer(
            dist.group.WORLD, experts=size.experts, policy=policy, timeout=120.0
        )
        homes = self.balancer.topology.home_experts(rank).tolist()
        drawn = drawn_weights(size, homes, self.device, dtype)
        weights = {name: torch.nn.Parameter(weight) for name, weight in drawn.items()}
        ids = ids_with(loads_of_skew(size, skew)[rank], size, seed=rank).to(self.device)
        gates = torch.full(ids.shape, 1 / size.top_k, device=self.device, requires_grad=True)
        router = FixedRouter(ids, gates)
        self.layers = [layer_with_weights(self.balancer, router, weights) for _ in range(layers)]
        self.x = torch.randn(size.tokens, size.hidden, device=self.device, dtype=dtype)
        self.leaves = (self.x.requires_grad_(), gates, *weights.values())

    def forget(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def forward(self) -> torch.Tensor:
        return torch.stack([layer(self.x).sum() for layer in self.layers]).sum()

    def step(self) -> None:
        self.forget()
        self.forward().backward()

    def step_bytes(self) -> int:
        """The most bytes that a step allocates."""
        self.forget()
        if self.device.type == "cpu":
            return saved_bytes(self.forward)
        free()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def saved_bytes(forward: Any) -> int:
    """Bytes of the tensors that autograd saves, each memory once."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = forward()
    outputs.backward()
    return sum(saved.values())


def on_rank(
    rank: int, size: Shape, skew: float, policy: str, layers: int
) -> tuple[int, int, float]:
    """Shared memory and the peak of a step, of the rank with most, and its milliseconds."""
    model = Model(rank, size, skew, policy, layers)
    for _ in range(2):
        model.step()  # loads kernels, measures rates, allocates what all steps share
    sizes = torch.tensor([model.balancer.plane(model.device).nbytes, model.step_bytes()])
    most = int(sizes.sum())
    everywhere: list[Any] = [None] * size.ranks
    dist.all_gather_object(everywhere, (most, sizes.tolist()))
    seconds = median(slowest(model.step, 1, model.device)[0] for _ in range(STEPS))
    model.balancer.close()
    shared, step = max(everywhere)[1]
    return shared, step, 1e3 * seconds


def lines(size: Shape, skew: float, numbers: Sequence[int]) -> Iterator[Line]:
    """Lines of all policies and numbers of layers at one skew."""
    peaks: dict[tuple[str, int], float] = {}
    for policy in POLICIES:
        for layers in numbers:
            shared, step, ms = on_ranks(size.ranks, on_rank, size, skew, policy, layers)
            peaks[policy, layers] = shared + step
            values = {SHARED: shared / 1e6, STEP_MEMORY: step / 1e6, STEP: ms}
            yield line(skew, policy, layers, peaks, values)
        few, many = numbers
        slope = (peaks[policy, many] - peaks[policy, few]) / (many - few)
        peaks[policy, MANY] = peaks[policy, many] + slope * (MANY - many)
        yield line(skew, policy, MANY, peaks, {SHARED: None, STEP_MEMORY: None, STEP: None})


def line(
    skew: float,
    policy: str,
    layers: int,
    peaks: dict[tuple[str, int], float],
    values: dict[Metric, float | None],
) -> Line:
    peak = peaks[policy, layers]
    values |= {PEAK: peak / 1e6, OVER: peak / peaks["none", layers]}
    return Line({"skew": skew, "policy": policy, "layers": layers}, values)


def main(argv: Sequence[str]) -> None:
    options = options_parser(__doc__).parse_args(argv[1:])
    cuda = on_gpu(toy=options.toy) and not options.toy
    size = TOY if options.toy else QWEN
    skews = (1.0, 1.2) if options.toy else SKEWS[-1:] if options.quick else SKEWS
    numbers = (1, 2) if options.toy else (1, 8)
    with report_of_ranks("memory", argv, size.ranks, cuda=cuda) as report:
        about = f"{size.about}, {size.tokens} tokens per rank, EP{size.ranks}; bytes of one rank"
        for skew in skews:
            report.add(about, list(lines(size, skew, numbers)))
            report.write(options.json)


if __name__ == "__main__":
    main(sys.argv)
