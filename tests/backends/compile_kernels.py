"""Compile the kernels of the GPU ahead of time, without a GPU, and print what they take there.

    python tests/backends/compile_kernels.py --sizes 64x256x1,512x2048x2 --targets sm_90,gfx942

A size is ranks x experts x slots. Every variant of a kernel that is launched for it is a line:
warps, registers of a thread, bytes or registers that are spilled, bytes of shared memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
COLUMNS = ("kernel", "size", "target", "warps", "registers", "spilled", "shared", "variant")
WIDTHS = (20, 12, 8, 5, 9, 7, 7, 0)
TYPES = {"torch.int32": "*i32", "torch.int64": "*i64", "torch.bool": "*i1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="64x256x1", help="ranks x experts x slots, by commas")
    parser.add_argument("--targets", default=",".join(TARGETS), help="by commas")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is first imported
    print(line(COLUMNS))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        jobs = [(t, s) for t in options.targets.split(",") for s in options.sizes.split(",")]
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, mp_context=fresh) as pool:
            for rows in pool.map(compile_all, *zip(*jobs, strict=True)):
                for row in rows:
                    print(line(row), flush=True)


def line(row: tuple[object, ...]) -> str:
    cells = zip(map(str, row), WIDTHS, strict=True)
    return " ".join(cell.ljust(width) for cell, width in cells).rstrip()


def compile_all(target: str, size: str) -> list[tuple[object, ...]]:
    """A row for every variant of every kernel that is launched for this size."""
    return [(name, size, target, *facts) for name, *facts in compiled(target, size)]


def compiled(target: str, size: str) -> Iterator[tuple[object, ...]]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, arguments, warps in launches(*map(int, size.split("x"))):
        fixed = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
        source = ASTSource(kernel, signature(kernel, arguments), fixed, aligned(kernel, arguments))
        made = triton.compile(source, GPUTarget(*TARGETS[target]), {"num_warps": warps})
        variant = ",".join(f"{name}={value}" for name, value in fixed.items())
        yield kernel.fn.__name__, warps, *resources(made), made.metadata.shared, variant


def launches(ranks: int, experts: int, slots: int) -> list[tuple[Any, dict[str, Any], int]]:
    """Every kernel with its arguments and warps, once for every variant."""
    from triton.runtime.jit import JITFunction

    found = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int, **named: Any):
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | named
        fixed = tuple(str(arguments[p.name]) for p in kernel.params if p.is_constexpr)
        found.setdefault((kernel.fn.__name__, fixed, num_warps), (kernel, arguments, num_warps))

    run, JITFunction.run = JITFunction.run, record
    try:
        for tolerance in (0.0, 0.01):
            launch_all(ranks, experts, slots, tolerance)
    finally:
        JITFunction.run = run
    return list(found.values())


def launch_all(ranks: int, experts: int, slots: int, tolerance: float, rows: int = 4096) -> None:
    """What a rank does in one step, and what it may do."""
    import torch

    from ultraep import BalanceConfig, Topology
    from ultraep.backends.triton.counter import Counter
    from ultraep.backends.triton.planner import Planner
    from ultraep.backends.triton.rerouter import Rerouter

    topology, config = (
        Topology(ranks=ranks, experts=experts, slots=slots),
        BalanceConfig(tolerance=tolerance),
    )
    planner = Planner(
        topology.experts_by_rank,
        topology.first_of_rank,
        topology.domain_size,
        topology.slots,
        config.tolerance_parts,
        config.min_tokens_per_replica,
        config.replica_limit,
        config.locality,
        torch.device("cpu"),
    )
    counter = Counter(experts, rows, torch.device("cpu"))
    rerouter = Rerouter(planner, counter)
    loads = torch.zeros(ranks, experts, dtype=torch.int32)
    received = torch.zeros(ranks, planner.num_slots // ranks, dtype=torch.int32)
    ids = torch.zeros(rows, dtype=torch.int64)
    slots_of_rows, order, positions = torch.zeros(3, rows, dtype=torch.int32)
    chosen = torch.zeros(rows, experts, dtype=torch.bool)
    counter.count(ids)
    planner.plan(loads)
    planner.bounds()
    rerouter.lines(loads, 0)
    rerouter.assign(ids, slots_of_rows, order, positions)
    rerouter.receive(loads, 0, received)
    counter.count_map(chosen)
    rerouter.assign_to_map(chosen, torch.zeros(rows, planner.num_slots, dtype=torch.bool))


def signature(kernel: Any, arguments: dict[str, Any]) -> dict[str, str]:
    return {
        p.name: "constexpr" if p.is_constexpr else type_of(arguments[p.name]) for p in kernel.params
    }


def type_of(argument: Any) -> str:
    return TYPES[str(argument.dtype)] if hasattr(argument, "dtype") else "i32"


def aligned(kernel: Any, arguments: dict[str, Any]) -> dict[tuple[int], list[list[object]]]:
    """The pointers that a launch would find to be aligned."""
    return {
        (p.num,): [["tt.divisibility", 16]]
        for p in kernel.params
        if hasattr(arguments[p.name], "data_ptr")
        and not p.do_not_specialize_on_alignment
        and arguments[p.name].data_ptr() % 16 == 0
    }


def resources(made: Any) -> tuple[int, int]:
    """Registers of a thread, and how much of them is spilled: bytes, on AMD registers."""
    if "amdgcn" in made.asm:
        text = made.asm["amdgcn"]
        return number(r"\.vgpr_count:\s+(\d+)", text), number(r"\.vgpr_spill_count:\s+(\d+)", text)
    text = usage(made.asm["cubin"])
    return number(r"REG:(\d+)", text), number(r"STACK:(\d+)", text)


def usage(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in {text}"
    return int(found[1])


if __name__ == "__main__":
    main()
