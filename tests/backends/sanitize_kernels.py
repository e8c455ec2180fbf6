"""Launch every kernel at a small size on a GPU, in one process, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/backends/sanitize_kernels.py
    compute-sanitizer --tool racecheck python tests/backends/sanitize_kernels.py

Runs the examples of kernels, then whole stages at sizes of several tiles: the control plane, a
layer of one rank forward and backward, also in FP8, and replicas for four ranks by one launch. The
sanitizer runs one kernel after the other, so no kernel may wait for a later one.

`--part 3/8`: one of eight parts, to compile them in eight processes first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch
from test_kernel_examples import EXAMPLES, RUNNER

import ultraep
from ultraep import BalanceConfig, BalancedMoE, Balancer, Rates, Topology
from ultraep.backends.triton import signals
from ultraep.backends.triton.device import default_device
from ultraep.backends.triton.signals import Signals
from ultraep.backends.triton.streamer import Streamer, pull
from ultraep.bundle import Layout
from ultraep.runtime.device_planner import DevicePlanner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from shared_peers import LocalPeers

DEVICE = default_device()


def control() -> None:
    """Count, plan and route with several settings."""
    rng = np.random.default_rng(0)
    by_time = BalanceConfig(rates=Rates(row=1000, copy=20_000, each=1000))
    settings = product(({}, {"slots": 2, "domain": 4}, {"slots": 0}), (None, by_time))
    for options, config in settings:
        topology = Topology(ranks=8, experts=32, **options)
        plane = DevicePlanner(topology, config, rows=600, device=DEVICE)
        ids = torch.from_numpy(np.minimum(rng.geometric(0.2, (200, 3)) - 1, 31)).to(DEVICE)
        loads = plane.count(ids)[None].repeat(8, 1)
        plan = plane.plan(loads)
        plane.reroute(ids, counted=True)
        plane.check()
        plan.to_host().check(loads.cpu().numpy())


def layer(dtype: torch.dtype, quantised: str | None = None) -> Callable[[], None]:
    """A layer of one rank, forward and backward, on both planes."""

    def passes() -> None:
        for plane in ("mapped", "messages"):
            balancer = Balancer("alone", experts=6, data_plane=plane)
            moe = BalancedMoE.swiglu(
                *(96, 80, 6, 2),
                balancer=balancer,
                bias=True,
                quantised=quantised,
                dtype=dtype,
                device=DEVICE,
            )
            x = torch.randn(70, 96, dtype=dtype, device=DEVICE, requires_grad=True)
            moe(x).sum().backward()
            balancer.check()
            balancer.close()

    return passes


def replicas(relay: str) -> Callable[[], None]:
    """Send weights for four ranks by one launch, twice; then sum gradients of one rank."""

    def send() -> None:
        topology = Topology(ranks=4, experts=8, slots=2)
        group = LocalPeers(4, device=DEVICE)
        own = [Signals(group.of(r), slots=2, buffers=1, timeout=60.0) for r in range(4)]
        streamers = [Streamer(board, topology, relay=relay, programs=2) for board in own]
        tensors = [{"w": torch.full((2, 999), float(r), device=DEVICE)} for r in range(4)]
        layout = Layout.of(tensors[0], 2)
        rows = [group.of(r).allocate("slots", 2 * layout.nbytes) for r in range(4)]
        made = torch.zeros(4, streamers[0].size, dtype=torch.int32, device=DEVICE)
        wanted = [[0, 1, 0], [0, 2, 0], [0, 3, 0], [5, 0, 1], [5, 3, 1], *[[-1, -1, -1]] * 3]
        replicas = torch.tensor(wanted, dtype=torch.int32, device=DEVICE)
        tables = [s.sources(layout, t) for s, t in zip(streamers, tensors, strict=True)]
        homes = torch.stack([table[0] for table in tables])
        for _ in range(2):
            for rank, streamer in enumerate(streamers):
                streamer.schedule(replicas, layout, made[rank])
            streamers[0].launch(homes, tables[0][1], made, layout.nbytes, rows[0], 0, 0, 4)
        for board in own:
            board.check()
        held = layout.views(rows[3].local.view(2, layout.nbytes))["w"]
        assert held[0].eq(0).all()
        assert held[1].eq(2).all()
        of_copies = group.of(0).allocate("gradients", 2 * 999 * 4)
        for piece in of_copies.handle:
            piece.view(torch.float32).fill_(1.0)
        summed = torch.zeros(2, 999, device=DEVICE)
        pull(summed, of_copies, made[0], streamers[0], programs=3)
        assert summed.sum(dim=1).tolist() == [3 * 999.0, 0.0]

    return send


def example(name: str) -> Callable[[], None]:
    def run() -> None:
        output: list[str] = []
        RUNNER.run(EXAMPLES[name], out=output.append, clear_globs=False)
        assert not output, "".join(output)

    return run


WORK = {f"example of {name}": example(name) for name in EXAMPLES} | {
    "control plane": control,
    "layer in float32": layer(torch.float32),
    "layer in bfloat16": layer(torch.bfloat16),
    "layer in FP8": layer(torch.bfloat16, "fp8"),
    "replicas sent directly": replicas("direct"),
    "replicas in chains": replicas("chain"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", default="0/1", help="part to run, as in 3/8")
    signals.polls_per_second = lambda device: 1e6  # the measurement takes minutes here
    part, parts = map(int, parser.parse_args().part.split("/"))
    for name in list(WORK)[part::parts]:
        WORK[name]()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        print(f"ran {name}", flush=True)
    print(f"{len(WORK)} pieces of work, part {part} of {parts}; ultraep {ultraep.__version__}")


if __name__ == "__main__":
    main()
