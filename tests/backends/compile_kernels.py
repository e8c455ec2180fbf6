"""Compile the GPU kernels ahead of time, without a GPU, and print the resources they use.

    python tests/backends/compile_kernels.py --sizes 64x256x1,512x2048x2 --targets sm_90,gfx942

A size is ranks x experts x slots; matrix products hardly depend on it and are compiled for the
first size only. Every variant of a kernel is one line: warps, registers per thread, spilled bytes
(on AMD registers), bytes of shared memory, bytes of a thread's widest load. With `--known FOLDER` a
variant is compiled once, until its source or Triton changes. With `--once TARGETS`, these targets
compile one variant of most kernels, and the other targets compile every variant of the first size.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
COLUMNS = {"kernel": 20, "size": 12, "target": 8, "warps": 5, "registers": 9}  # and their widths
COLUMNS |= {"spilled": 7, "shared": 7, "widest": 6, "variant": 0}
EXCHANGED = [("bfloat16", 8), ("float32", 8), ("bfloat16", 10)]  # dtype of rows, top k
MATRICES = ("multiply", "weight_gradients")  # compiled in full everywhere
PRODUCTS = [(4096, 1536, False), (2880, 2880, True)]  # model width, hidden width, with biases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", default="64x256x1", help="comma-separated ranks x experts x slots"
    )
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated GPUs")
    parser.add_argument("--once", default="", help="targets that compile few variants")
    parser.add_argument("--known", type=Path, help="directory that caches the results")
    parser.add_argument("--workers", type=int, default=2, help="compiler processes")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is first imported
    print(line(tuple(COLUMNS)))
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        known = options.known or Path(cache)
        fresh = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.workers, mp_context=fresh) as pool:
            sizes, once = options.sizes.split(","), options.once.split(",")
            targets = options.targets.split(",")
            every = {t: [] if t in once else sizes[:1] if any(once) else sizes for t in targets}
            jobs = [pool.submit(compile_all, t, sizes, every[t], known) for t in targets]
            for job in jobs:
                for row in job.result():
                    print(line(row), flush=True)


def line(row: tuple[object, ...]) -> str:
    cells = zip(map(str, row), COLUMNS.values(), strict=True)
    return " ".join(cell.ljust(width) for cell, width in cells).rstrip()


def compile_all(
    target: str, sizes: list[str], every: list[str], known: Path
) -> list[tuple[object, ...]]:
    """Return a row for every variant of the sizes in `every`, and for one variant otherwise."""
    from triton.backends.compiler import GPUTarget

    machine = GPUTarget(*TARGETS[target])
    products = {sizes[0]: PRODUCTS if every else PRODUCTS[-1:]}
    variants = [
        (size, launch)
        for size in sizes
        for launch in launches(*map(int, size.split("x")), machine, products.get(size, []))
    ]
    last = {source.name: source for _, (source, _) in variants}
    return [
        (source.name, size, target, *facts(source, options, machine, known))
        for size, (source, options) in variants
        if size in every or source.name in MATRICES or source is last[source.name]
    ]


def facts(source: Any, options: dict[str, int], machine: Any, known: Path) -> list[object]:
    """Return the columns after the target, from the cache or by compiling."""
    import triton

    key = (source.hash(), triton.__version__, machine, sorted(options.items()))
    file = known / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.json"
    if file.exists():
        return json.loads(file.read_text())
    compiled = triton.compile(source, machine, options)
    resource_use = (*resources(compiled), compiled.metadata.shared, widest_load(compiled))
    row = [options["num_warps"], *resource_use, constants_of(source)]
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(row))
    unfinished.replace(file)
    return row


def launches(
    ranks: int, experts: int, slots: int, machine: Any, products: list[tuple[int, int, bool]]
) -> list[tuple[Any, dict[str, int]]]:
    """Return source and options of every variant of every kernel that is launched."""
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    variants, backend = {}, make_backend(machine)

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialisation, _ = bind(*args, **named)
        _, *parts = kernel._pack_args(backend, named, bound, specialisation, None)
        source = ASTSource(kernel, *parts)
        options = {name: named[name] for name in ("num_warps", "num_stages") if name in named}
        variants.setdefault((source.name, constants_of(source), str(options)), (source, options))

    run, JITFunction.run = JITFunction.run, record
    try:
        for speeds in ((), range(900, 900 + ranks)):
            launch_all(ranks, experts, slots, 0.0, speeds)
            launch_all(ranks, experts, slots, 0.01, speeds)
            launch_all(ranks, experts, slots, 0.0, speeds, row=1)
        for hidden, ffn, biases in products:
            launch_products(experts // ranks, slots, hidden, ffn, biases, machine)
            launch_fp8(experts // ranks, slots, hidden, ffn, biases, machine)
        for dtype, top_k in EXCHANGED:
            launch_exchange(ranks, experts, slots, dtype, top_k)
        for relay, dtype in (("direct", "bfloat16"), ("chain", "float32"), ("auto", "float64")):
            launch_data(ranks, experts, slots, relay, dtype)
    finally:
        JITFunction.run = run
    return list(variants.values())


def constants_of(source: Any) -> str:
    """Return what the kernel is compiled for, without spaces."""
    constants = {
        ".".join([source.fn.arg_names[first], *map(str, path)]): value
        for (first, *path), value in source.constants.items()
    }
    return ",".join(f"{name}={value}" for name, value in constants.items()).replace(" ", "") or "-"


def launch_all(
    ranks: int,
    experts: int,
    slots: int,
    tolerance: float,
    speeds: Sequence[int],
    row: int = 0,
    rows: int = 4096,
) -> None:
    import torch

    from ultraep import BalanceConfig, Topology
    from ultraep.backends.limits import Limits
    from ultraep.backends.triton.planner import Planner
    from ultraep.backends.triton.rerouter import Counter, Rerouter

    topology, config = (
        Topology(ranks=ranks, experts=experts, slots=slots),
        BalanceConfig(tolerance=tolerance, speeds=tuple(speeds) or None),
    )
    limits = Limits.of(topology, config)._replace(rates=(row, 0, 0, 0))
    device = torch.device("cpu")
    planner = Planner(limits, locality=config.locality, device=device)
    counter = Counter(experts, rows, torch.device("cpu"))
    rerouter = Rerouter(planner, counter)
    loads = torch.zeros(ranks, experts, dtype=torch.int32)
    received = torch.zeros(ranks, planner.num_slots // ranks, dtype=torch.int32)
    ids = torch.zeros(rows, dtype=torch.int64)
    slots_of_rows, order, positions = torch.zeros(3, rows, dtype=torch.int32)
    counter.count(ids)
    planner.plan(loads)
    rerouter.lines(loads, 0)
    rerouter.assign(ids, slots_of_rows, order, positions)
    rerouter.receive(loads, 0, received)


def launch_products(
    homes: int, slots: int, hidden: int, ffn: int, biases: bool, machine: Any, rows: int = 4096
) -> None:
    from contextlib import nullcontext
    from dataclasses import replace

    import torch

    from ultraep.backends.triton.blocks import TABLES
    from ultraep.backends.triton.products import TritonProducts
    from ultraep.backends.triton.scaling import scale_rows, scale_rows_backward
    from ultraep.ops.products import Beside, Stacks, activation_named

    half, single = torch.bfloat16, torch.float32

    def stacks(*shape: int, dtype: Any = half, of_homes: Any = None) -> Stacks:
        home_stack = torch.empty(homes, *shape, dtype=of_homes or dtype)
        return Stacks(home_stack, torch.empty(slots, *shape, dtype=dtype))

    offsets = torch.empty(homes + slots + 1, dtype=torch.int32)
    table, swiglu = TABLES[machine.backend], activation_named("swiglu")
    products = TritonProducts(offsets, swiglu, half, programs=132, table=table)
    up, down = stacks(2 * ffn, hidden), stacks(hidden, ffn)
    up_bias, down_bias = (stacks(2 * ffn), stacks(hidden)) if biases else (None, None)
    d_down_bias = stacks(hidden, dtype=single) if biases else None
    outer, scale = torch.empty(rows, hidden, dtype=half), torch.empty(rows)
    wide = products.multiply(outer, up, up_bias)
    narrow = products.activate(wide)
    products.multiply(narrow, down, down_bias, scale=scale)
    products.multiply_transposed(outer, down)
    products.multiply_transposed(outer, down, beside=Beside(8, nullcontext))
    products.activate_backward(wide, narrow, scale)
    gradients = stacks(hidden, ffn, dtype=single)
    products.weight_gradients(outer, narrow, gradients, d_down_bias, scale=scale)
    mixed = stacks(hidden, ffn, dtype=single, of_homes=half)
    products.weight_gradients(outer, narrow, mixed, None)
    sums, spans = torch.empty(homes, hidden, ffn), torch.empty(homes, 2, dtype=torch.int32)
    products.weight_gradients(outer, narrow, replace(mixed, sums=sums, spans=spans), None)
    if down_bias is not None:
        products.row_dots(outer, down_bias, scale)
    scale_rows(outer, scale, outer)
    scale_rows_backward(outer, outer, scale, scale)


def launch_fp8(
    homes: int, slots: int, hidden: int, ffn: int, biases: bool, machine: Any, rows: int = 4096
) -> None:
    from dataclasses import replace

    import torch

    from ultraep.backends.triton.blocks import E4M3_FROM, TABLES
    from ultraep.backends.triton.fp8 import dequantise, quantise
    from ultraep.backends.triton.products import TritonProducts
    from ultraep.ops.fp8 import E4M3, pack, parts
    from ultraep.ops.products import Stacks, activation_named

    def stacks(*shape: int, dtype: Any = torch.bfloat16) -> Stacks:
        return Stacks(*(torch.empty(count, *shape, dtype=dtype) for count in (homes, slots)))

    offsets = torch.empty(homes + slots + 1, dtype=torch.int32)
    outer, wide = (torch.empty(rows, width, dtype=torch.bfloat16) for width in (hidden, 2 * ffn))
    codes, scales = stacks(hidden, ffn, dtype=E4M3), stacks(hidden, 1, dtype=torch.float32)
    quantise(torch.empty(homes, hidden, ffn, dtype=torch.bfloat16), codes.homes, scales.homes)
    dequantise(codes.homes, scales.homes, torch.bfloat16)
    dequantise(*parts(pack(outer, quantise), hidden), outer.dtype, offsets[-1:])
    table, swiglu = TABLES[machine.backend], activation_named("swiglu")
    products = TritonProducts(offsets, swiglu, outer.dtype, 132, table, fp8=True)
    packed = products.activate(wide)
    if machine.backend == "cuda" and divmod(machine.arch, 10) >= E4M3_FROM:
        bias, gates = (stacks(hidden), torch.empty(rows)) if biases else (None, None)
        products.multiply(packed, replace(codes, scales=scales), bias, scale=gates, out=outer)


def launch_exchange(ranks: int, experts: int, slots: int, dtype: str, top_k: int) -> None:
    import torch

    from ultraep import Topology
    from ultraep.backends.triton.exchange import RowExchange, RowMap
    from ultraep.comm import Region

    def empty(*shape: int, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def region(num_bytes: int) -> Any:
        addresses = empty(ranks, dtype=torch.int64)
        return Region(empty(num_bytes, dtype=torch.uint8), addresses)

    tokens, width, arrived = 512, 7168, 8192
    first_slot = Topology(ranks=ranks, experts=experts, slots=slots).first_slot_of_rank
    rows = empty(arrived, width, dtype=getattr(torch, dtype))
    values, served, scalars_A = region(rows.nbytes), region(rows.nbytes), region(8 * arrived)
    exchange = RowExchange(first_slot, rank=0, fault=empty(1), programs=132)
    received, scalars = empty(ranks, exchange.num_local), empty(tokens, top_k, dtype=torch.float32)
    routed, num_routed = empty(tokens * top_k), tokens * top_k
    tables = region(exchange.table_bytes(num_routed))
    counts = empty(exchange.num_slots), received, empty(ranks)
    heads = exchange.tables(tables, *counts, num_routed, arrived)
    origins, landings = (empty(n, dtype=torch.int64) for n in (arrived, num_routed))
    row_map = RowMap(*heads, origins, landings)
    exchange.expose(tables, routed, scalars, num_routed)
    exchange.expose_values(values, rows[:tokens])
    gates = empty(arrived, dtype=torch.float32)
    exchange.origins(tables, received, origins, gates, num_routed)
    exchange.landings(tables, routed, routed, landings, arrived)
    exchange.gather_rows(values, row_map, rows, top_k)
    exchange.sum_rows(served, None, row_map, rows[:tokens], None, top_k)
    exchange.sum_rows(served, scalars_A, row_map, rows[:tokens], scalars, top_k)


class RankZero:
    """Rank 0 of a group; the kernels are compiled and never run."""

    rank = 0

    def __init__(self, size: int) -> None:
        import torch

        self.size, self.device = size, torch.device("cpu")

    def allocate(self, _name: str, nbytes: int) -> Any:
        import torch

        from ultraep.comm import Region

        local = torch.zeros(nbytes, dtype=torch.uint8)
        return Region(local, torch.full((self.size,), local.data_ptr()))


def launch_data(ranks: int, experts: int, slots: int, relay: str, dtype: str) -> None:
    import torch

    from ultraep import Topology
    from ultraep.backends.triton.signals import Signals
    from ultraep.backends.triton.streamer import Streamer, pull
    from ultraep.bundle import Layout

    width = 4096
    peers = RankZero(ranks)
    signals = Signals(peers, slots=slots, buffers=1, timeout=1.0, numbers=experts)
    loads = torch.zeros(experts, dtype=torch.int32)
    signals.share(loads, loads)
    signals.barrier("rows")
    topology = Topology(ranks=ranks, experts=experts, slots=slots)
    streamer = Streamer(signals, topology, relay=relay, programs=64)
    weights = {"w": torch.zeros(streamer.homes, width, dtype=getattr(torch, dtype))}
    layout = Layout.of(weights, streamer.homes)
    schedule = torch.zeros(streamer.size, dtype=torch.int32)
    rows = peers.allocate("rows", 64)
    streamer.schedule(torch.zeros(streamer.max_replicas, 3, dtype=torch.int32), layout, schedule)
    streamer.fill(schedule, layout, weights, rows)
    pull(weights["w"], rows, schedule, streamer, programs=528)
    pull(weights["w"], rows, schedule, streamer, programs=8, large=True)


def resources(compiled: Any) -> tuple[int, int]:
    """Return registers per thread, and spilled bytes; on AMD spilled registers."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        return number(r"\.vgpr_count:\s+(\d+)", text), number(r"\.vgpr_spill_count:\s+(\d+)", text)
    text = usage(compiled.asm["cubin"])
    return number(r"REG:(\d+)", text), number(r"STACK:(\d+)", text)


def widest_load(compiled: Any) -> int:
    """Return the bytes of a thread's widest load from global memory; 0: it loads none."""
    if "amdgcn" in compiled.asm:
        loads = re.findall(r"(?:global|buffer|flat)_load_dword(?:x(\d))?\s", compiled.asm["amdgcn"])
        return max((4 * int(times or 1) for times in loads), default=0)
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\s", compiled.asm["ptx"])
    return max((int(times or 1) * int(size) // 8 for times, size in loads), default=0)


def usage(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in {text}"
    return int(match[1])


if __name__ == "__main__":
    main()
