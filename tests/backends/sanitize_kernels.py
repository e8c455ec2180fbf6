"""Launch every kernel at a small size on a GPU, in one process, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/backends/sanitize_kernels.py
    compute-sanitizer --tool racecheck python tests/backends/sanitize_kernels.py

Runs the examples of kernels, then whole stages at sizes of several tiles: the control plane, and a
layer of one rank forward and backward, also in FP8. The sanitizer runs one kernel after the other,
so no kernel may wait for a later one.

`--part 3/8`: one of eight parts, to compile them in eight processes first.
"""

import argparse
from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from test_kernel_examples import EXAMPLES, RUNNER

import ultraep
from ultraep import BalanceConfig, BalancedMoE, Balancer, Rates, Topology
from ultraep.backends.triton import signals
from ultraep.backends.triton.device import default_device
from ultraep.runtime.device_planner import DevicePlanner

DEVICE = default_device()


def control() -> None:
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
