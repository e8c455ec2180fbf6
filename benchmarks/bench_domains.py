"""A MoE layer over several fast-link domains: the hybrid plane beside messages.

    python benchmarks/bench_domains.py                     # 2 x 2 CPU processes
    python benchmarks/bench_domains.py --mbit 1000,10000   # on two simulated hosts (needs root)
    python benchmarks/bench_domains.py --cuda              # 2 x 4 processes on one GPU (CUDA MPS)
    python benchmarks/bench_domains.py --cuda --toy        # the same in Triton's interpreter
    python benchmarks/bench_domains.py --toy               # tiny, for CI

In every domain one rank is hot. Outputs and gradients of all variants are compared with the
unbalanced layer over messages before the timing. Ranks at the same place of all domains share a
core of the simulated hosts, so balancing inside a domain takes work off a core. `crossing` counts
the bytes that a step sends between domains: rows of tokens, and of their gradients, with gates and
slots. Variants alternate; times are medians over rounds of the slowest rank. `cpu gain` compares
the processor time of the busiest rank, which other programs disturb less. A load that takes longer
than `Size.limit` seconds ends the run.

On one GPU, messages travel through the memory of the host.

Shapes: T tokens of a rank, K experts per token, R ranks, E experts.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import simulated_hosts
import torch
import torch.distributed as dist
from harness import Line, Metric, options_parser
from layers import AFTER, BEFORE, GAIN, LESS, STEP, Spent, Variants, median_ratio, on_ranks, slowest
from load_cases import Shape, draw, hot
from mps import ThroughHost, device_of_rank, report_of_ranks
from shared_peers import SharedPeers
from timing import in_turns, on_gpu, print_progress

import ultraep
from ultraep import BalanceConfig
from ultraep.arrays import IntArray
from ultraep.runtime.connect import connect

MESSAGES, HYBRID = "messages", "hybrid"
TIMEOUT = 60.0  # seconds to wait for a rank
VARIANTS = {  # policy, data plane
    "messages, none": ("none", MESSAGES),
    "messages": ("ultraep", MESSAGES),
    "hybrid, none": ("none", HYBRID),
    "hybrid": ("ultraep", HYBRID),
}
CROSSING = Metric("crossing_bytes", "MB", "MB crossing", ".3f")
SPEED_UP = Metric("speed_up_over_messages", "ratio", "over messages", ".3f")
BYTES_RATIO = Metric("bytes_of_messages", "ratio", "bytes of messages", ".3f")


@dataclass(frozen=True, kw_only=True)
class Size(Shape):
    """A layer over domains, and what is measured with it."""

    domain: int
    ratios: tuple[float, ...] = (1.0, 1.5, 2.0)  # imbalance inside of each domain
    rounds: int = 7
    steps: int = 2
    limit: float = 1800.0  # seconds of one load
    objective: str = "time"
    kernels: bool = False  # mapped memory inside of a domain; without a GPU, by the interpreter


CPU = Size(
    ranks=4,
    domain=2,
    hidden=512,
    ffn=128,
    experts=32,
    top_k=8,
    tokens=512,
    ratios=(1.0, 1.5, 1.8),  # two ranks: less than 2
)
# Wide experts: ranks compute longer than the host takes to carry rows between domains.
GPU = Size(
    ranks=8,
    domain=4,
    hidden=4096,
    ffn=6144,
    experts=32,
    top_k=8,
    tokens=1024,
    rounds=5,
    steps=1,
    limit=90.0,  # the first load compiles kernels
    kernels=True,
)
# Little work per row, so that a network of 20 to 200 Mbit/s is what limits a step.
HOSTS = replace(CPU, ffn=32, tokens=256, ratios=(1.0, 1.5), rounds=5, steps=1)
# Much work per row: at 1 Gbit/s and more, the ranks compute longer than the network takes.
# They plan for balance: rates that ranks measure while they share cores vary too much.
FAST_HOSTS = replace(CPU, ffn=1024, tokens=256, rounds=5, steps=1, objective="balance")
FAST = 1000  # Mbit/s
TOY = replace(CPU, hidden=32, ffn=16, experts=8, top_k=4, tokens=32, ratios=(1.5,), rounds=1)


class CrossingCounter:
    """Counts the bytes that a communicator sends to other domains with rows."""

    def __init__(self, comm: Any, domain: int) -> None:
        self.nbytes, own = 0, comm.rank // domain
        inner = comm.all_to_all

        def counted(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Any:
            leaving = sum(n for rank, n in enumerate(sent) if rank // domain != own)
            self.nbytes += leaving * rows[:1].numel() * rows.itemsize
            return inner(rows, sent, received)

        comm.all_to_all = counted


def loads_of(size: Size, imbalance: float) -> IntArray:
    """[R, E] rows: the same imbalance in every domain."""
    domains = size.ranks // size.domain
    part = replace(
        size, ranks=size.domain, experts=size.experts // domains, top_k=size.top_k // domains
    )
    return np.tile(draw(hot(imbalance), part), (domains, domains))


class Planes(Variants):
    """The layer of one rank with every plane and policy."""

    def __init__(self, size: Size, rank: int, device: torch.device) -> None:
        super().__init__(size, rank, device)
        self.counters: dict[str, CrossingCounter] = {}
        for name, (policy, plane) in VARIANTS.items():
            balancer = ultraep.Balancer._with_settings(
                **communication(size, rank, device, plane),
                experts=size.experts,
                domain=size.domain,
                config=BalanceConfig(policy=policy, objective=size.objective),
                data_plane=plane,
                timeout=TIMEOUT,
            )
            self.counters[name] = CrossingCounter(balancer.comm, size.domain)
            self.add(name, balancer)

    def crossing(self, name: str) -> float:
        """Return the bytes that all ranks send to other domains in one step."""
        counter = self.counters[name]
        counter.nbytes = 0
        self.step(name)
        total = torch.tensor(counter.nbytes)
        dist.all_reduce(total)
        return float(total)


def communication(size: Size, rank: int, device: torch.device, plane: str) -> dict[str, Any]:
    """The group of a balancer and, without a GPU, its peers of mapped memory."""
    if device.type == "cuda":
        return {"group": ThroughHost(connect(dist.group.WORLD, timeout=TIMEOUT))}
    if not size.kernels or plane != HYBRID:
        return {"group": dist.group.WORLD}
    first = rank - rank % size.domain
    inside = range(first, first + size.domain)
    peers = SharedPeers(dist.new_group(inside, use_local_synchronization=True))
    return {"group": dist.group.WORLD, "peers": peers}


def on_rank(rank: int, size: Size, cuda: bool) -> list[dict[str, Any]]:
    """Measure all loads in one process."""
    variants, cases = Planes(size, rank, device_of_rank(cuda=cuda)), []
    for ratio in size.ratios:
        faulthandler.dump_traceback_later(size.limit, exit=True)
        variants.route(loads_of(size, ratio))
        for name in VARIANTS:
            variants.step(name)  # allocates memory, measures rates
        variants.check(list(VARIANTS))
        hosts = {name: variants.plan(name) for name in VARIANTS}
        crossing = {name: variants.crossing(name) for name in VARIANTS}

        def spent(name: str) -> Spent:
            return slowest(partial(variants.step, name), size.steps, variants.device)

        spent_of = in_turns(list(VARIANTS), size.rounds, spent, warmup=1)
        seconds_of = {name: [wall for wall, _ in times] for name, times in spent_of.items()}
        busy_of = {name: [busy for _, busy in times] for name, times in spent_of.items()}
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            medians = {name: f"{median(times) * 1e3:.1f} ms" for name, times in seconds_of.items()}
            print_progress(f"imbalance {ratio:g}: {medians}")
        cases.append(
            {
                "ratio": ratio,
                "seconds": {name: median(times) for name, times in seconds_of.items()},
                "gain": over_unbalanced(seconds_of),
                "busy": over_unbalanced(busy_of),
                "crossing": crossing,
                "routes": {n: p.digest() for n, p in hosts.items()},
                "imbalance": {n: (p.initial_imbalance, p.imbalance) for n, p in hosts.items()},
            }
        )
    variants.close()
    return cases


def over_unbalanced(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Gain of every variant over the same plane without balancing."""
    return {
        name: median_ratio(values[f"{plane}, none"], values[name])
        for name, (_, plane) in VARIANTS.items()
    }


def lines_of(case: dict[str, Any], network: str) -> list[Line]:
    lines = []
    for name, (policy, _) in VARIANTS.items():
        like = next(n for n, (p, plane) in VARIANTS.items() if (p, plane) == (policy, MESSAGES))
        before, after = case["imbalance"][name]
        values = {
            STEP: case["seconds"][name] * 1e3,
            CROSSING: case["crossing"][name] / 1e6,
            GAIN: case["gain"][name],
            LESS: case["busy"][name],
            SPEED_UP: case["seconds"][like] / case["seconds"][name],
            BYTES_RATIO: case["crossing"][like] / case["crossing"][name],
            BEFORE: before,
            AFTER: after,
        }
        about = {"network": network, "imbalance inside": case["ratio"], "variant": name}
        lines.append(Line(about, values, case["routes"][name]))
    return lines


# -- simulated hosts ---------------------------------------------------------------------------


def on_hosts(size: Size, mbit: int) -> Any:
    """Run `on_rank` in processes of simulated hosts; return the result of rank 0."""
    domains = size.ranks // size.domain
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": simulated_hosts.LINK, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder, simulated_hosts.hosts(domains, mbit) as hosts:
        torch.save(size, f"{folder}/size")
        processes = []
        for rank in range(size.ranks):
            argv = [sys.executable, __file__, "--rank", str(rank), "--folder", folder]
            argv += ["--address", hosts[0].address]
            command = hosts[rank // size.domain].command(argv)
            processes.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait(timeout=1800) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")
        return torch.load(f"{folder}/result", weights_only=False)


def on_simulated_host(rank: int, folder: str, address: str) -> None:
    """The work of one process that `on_hosts` started."""
    size: Size = torch.load(f"{folder}/size", weights_only=False)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))  # ranks at the same place of all domains share a core
    os.sched_setaffinity(0, {cores[rank % size.domain % len(cores)]})
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:29577", rank=rank, world_size=size.ranks
    )
    result = on_rank(rank, size, False)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str]) -> None:
    parser = options_parser(__doc__)
    rates = "simulate hosts whose network sends this many megabits per second"
    parser.add_argument("--mbit", type=_numbers, default=(), metavar="N,M", help=rates)
    parser.add_argument("--cuda", action="store_true", help="2 x 4 processes on one GPU")
    for hidden in ("--rank", "--folder", "--address"):
        parser.add_argument(hidden, help="for the processes of simulated hosts")
    options = parser.parse_args(argv[1:])
    if options.rank is not None:
        on_simulated_host(int(options.rank), options.folder, options.address)
        return
    if options.mbit and (obstacle := simulated_hosts.obstacle()):
        raise SystemExit(f"--mbit: hosts cannot be simulated here: {obstacle}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # removes simulated hosts
    cuda = options.cuda and on_gpu(toy=options.toy)
    hosts = FAST_HOSTS if min(options.mbit, default=0) >= FAST else HOSTS
    size = GPU if cuda else hosts if options.mbit else CPU
    if options.toy:
        size = replace(TOY, kernels=options.cuda)
    if options.quick:
        size = replace(size, ratios=(1.0, 1.5), rounds=3)
    runs: dict[str, Callable[[], Any]] = {
        f"{rate} Mbit/s": partial(on_hosts, size, rate) for rate in options.mbit
    }
    runs = runs or {"one host": partial(on_ranks, size.ranks, on_rank, size, cuda)}
    with report_of_ranks("domains", argv, size.ranks, cuda=cuda) as report:
        for network, run in runs.items():
            for case in run():
                title = f"{size.ranks // size.domain} domains of {size.domain}: {size.about}"
                report.add(title, lines_of(case, network))
            report.write(options.json)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    main(sys.argv)
