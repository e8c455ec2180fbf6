"""Compile the kernels of the GPU ahead of time, without a GPU, and print what they take there.

    python tests/backends/compile_kernels.py --sizes 64x256x1,512x2048x2 --targets sm_90,gfx942

A size is ranks x experts x slots; products of matrices hardly depend on it, and are compiled for
the first one only. Every variant of a kernel that is launched for it is a line: warps, registers of
a thread, bytes or registers that are spilled, bytes of shared memory, bytes of the widest load of a
thread. With `--known FOLDER` a variant is compiled once, until its source or Triton changes. With
`--once TARGETS` these get one variant of most kernels, and the others every one for the first size.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
COLUMNS = (
    "kernel",
    "size",
    "target",
    "warps",
    "registers",
    "spilled",
    "shared",
    "widest",
    "variant",
)
WIDTHS = (20, 12, 8, 5, 9, 7, 7, 6, 0)
TYPES = {
    "torch.int32": "*i32",
    "torch.int64": "*i64",
    "torch.bool": "*i1",
    "torch.bfloat16": "*bf16",
    "torch.float32": "*fp32",
    "torch.float64": "*fp64",
    "torch.uint8": "*u8",
    "torch.float8_e4m3fn": "*fp8e4nv",
}
EXCHANGED = [("bfloat16", 8), ("float32", 8), ("bfloat16", 10)]  # rows, choices of every token
MATRICES = (
    "multiply",
    "multiply_quantised",
    "weight_gradients",
)  # what they take depends on the target most
PRODUCTS = [(4096, 1536, False), (2880, 2880, True)]  # model width, hidden width, with biases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="64x256x1", help="ranks x experts x slots, by commas")
    parser.add_argument("--targets", default=",".join(TARGETS), help="by commas")
    parser.add_argument(
        "--once",
        default="",
        help="targets with one variant of most kernels, as sizes but the first",
    )
    parser.add_argument("--known", type=Path, help="folder that keeps what was found")
    parser.add_argument("--workers", type=int, default=2, help="processes that compile")
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is first imported
    print(line(COLUMNS))
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
    cells = zip(map(str, row), WIDTHS, strict=True)
    return " ".join(cell.ljust(width) for cell, width in cells).rstrip()


def compile_all(
    target: str, sizes: list[str], every: list[str], known: Path
) -> list[tuple[object, ...]]:
    """A row for every variant of every kernel that is launched for `every` size, and for the last
    one of the others; of products, for one of their shapes if there is no size with every variant.
    """
    from triton.backends.compiler import GPUTarget

    machine = GPUTarget(*TARGETS[target])
    products = {sizes[0]: PRODUCTS if every else PRODUCTS[-1:]}
    found = [
        (size, launch)
        for size in sizes
        for launch in launches(*map(int, size.split("x")), machine, products.get(size, []))
    ]
    last = {launch[0].fn.__name__: launch for _, launch in found}
    return [
        (name, size, target, *facts(*launch, machine, known))
        for size, launch in found
        for name in [launch[0].fn.__name__]
        if size in every or name in MATRICES or launch is last[name]
    ]


def facts(
    kernel: Any, arguments: dict[str, Any], options: dict[str, int], machine: Any, known: Path
) -> list[object]:
    """The columns behind the target: as they were found before, or by compiling."""
    import triton
    from triton.compiler import ASTSource

    fixed_ones = fixed(kernel, arguments)
    source = ASTSource(kernel, signature(kernel, arguments), fixed_ones, aligned(kernel, arguments))
    key = (source.hash(), triton.__version__, machine, sorted(options.items()))
    file = known / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.json"
    if file.exists():
        return json.loads(file.read_text())
    made = triton.compile(source, machine, options)
    variant = ",".join(f"{name}={value}" for name, value in fixed_ones.items()) or "-"
    found = [
        options["num_warps"],
        *resources(made),
        made.metadata.shared,
        widest_load(made),
        variant,
    ]
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(found))
    unfinished.replace(file)
    return found


def launches(
    ranks: int, experts: int, slots: int, machine: Any, products: list[tuple[int, int, bool]]
) -> list[tuple[Any, dict[str, Any], dict[str, int]]]:
    """Every kernel with its arguments, warps and stages, once for every variant."""
    from triton.runtime.jit import JITFunction

    found = {}

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any):
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | named
        options = {name: named[name] for name in ("num_warps", "num_stages") if name in named}
        variant = (kernel.fn.__name__, str(fixed(kernel, arguments)), str(options))
        found.setdefault(variant, (kernel, arguments, options))

    run, JITFunction.run = JITFunction.run, record
    try:
        launch_all(ranks, experts, slots, 0.0)
        launch_all(ranks, experts, slots, 0.01)
        launch_all(ranks, experts, slots, 0.0, row=1)
        for hidden, ffn, biases in products:
            launch_products(experts // ranks, slots, hidden, ffn, biases, machine)
            launch_quantised(experts // ranks, slots, hidden, ffn, biases, machine)
        for dtype, top_k in EXCHANGED:
            launch_exchange(ranks, experts, slots, dtype, top_k)
        for relay, dtype in (("direct", "bfloat16"), ("chain", "float32"), ("auto", "float64")):
            launch_data(ranks, experts, slots, relay, dtype)
    finally:
        JITFunction.run = run
    return list(found.values())


def launch_all(
    ranks: int, experts: int, slots: int, tolerance: float, row: int = 0, rows: int = 4096
) -> None:
    """What a rank does in one step, and what it may do."""
    import torch

    from ultraep import BalanceConfig, Topology
    from ultraep.backends.limits import Limits
    from ultraep.backends.triton.counter import Counter
    from ultraep.backends.triton.history import PlanRing, PlanSums
    from ultraep.backends.triton.planner import Planner
    from ultraep.backends.triton.rerouter import Rerouter

    topology, config = (
        Topology(ranks=ranks, experts=experts, slots=slots),
        BalanceConfig(tolerance=tolerance),
    )
    limits = Limits.of(topology, config)._replace(rates=(row, 0, 0, 0))
    planner = Planner(limits, locality=config.locality, device=torch.device("cpu"))
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
    sums = PlanSums(torch.zeros(8, dtype=torch.int64), topology.home_of_expert, ranks)
    sums.add(planner.num_replicas, planner.rank_loads, planner.replicas, planner.quotas)
    ring = PlanRing(2, loads.numel() + planner.result.numel(), torch.device("cpu"))
    ring.keep(0, loads, planner.result)
    rerouter.lines(loads, 0)
    rerouter.assign(ids, slots_of_rows, order, positions)
    rerouter.receive(loads, 0, received)
    counter.count_map(chosen)
    rerouter.assign_to_map(chosen, torch.zeros(rows, planner.num_slots, dtype=torch.bool))


def capability(machine: Any) -> tuple[str, tuple[int, int]]:
    return machine.backend, divmod(machine.arch, 10) if machine.backend == "cuda" else (0, 0)


def launch_products(
    homes: int, slots: int, hidden: int, ffn: int, biases: bool, machine: Any, rows: int = 4096
) -> None:
    """The networks of all slots, forward and backward; the second one with weights of the rows."""
    from contextlib import nullcontext
    from dataclasses import replace

    import torch

    from ultraep.backends.triton.blocks import table_for
    from ultraep.backends.triton.grouped import Beside, Grouped, Stacks
    from ultraep.backends.triton.products import scale_rows, scale_rows_backward

    def room(*shape: int, dtype: Any = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def stacks(*shape: int, dtype: Any = torch.bfloat16) -> Stacks:
        return Stacks(room(homes, *shape, dtype=dtype), room(slots, *shape, dtype=dtype))

    offsets = torch.empty(homes + slots + 1, dtype=torch.int32)
    grouped = Grouped(offsets, programs=132, table=table_for(*capability(machine)))
    scale, single = room(rows, dtype=torch.float32), torch.float32
    up, down = stacks(2 * ffn, hidden), stacks(hidden, ffn)
    up_bias, down_bias = (stacks(2 * ffn), stacks(hidden)) if biases else (None, None)
    d_down_bias = stacks(hidden, dtype=single) if biases else None
    wide, narrow, outer = room(rows, 2 * ffn), room(rows, ffn), room(rows, hidden)
    grouped.multiply(outer, up, wide, bias=up_bias)
    grouped.swiglu(wide, narrow)
    grouped.multiply(narrow, down, outer, bias=down_bias, scale=scale)
    grouped.multiply_transposed(outer, down, narrow)
    grouped.multiply_transposed(outer, down, narrow, beside=Beside(8, nullcontext))
    grouped.swiglu_backward(wide, narrow, wide, hidden=narrow, scale=scale, d_scale=scale)
    grouped.weight_gradients(
        outer, narrow, stacks(hidden, ffn, dtype=single), bias=d_down_bias, scale=scale
    )
    mixed = Stacks(room(homes, hidden, ffn), room(slots, hidden, ffn, dtype=single))
    grouped.weight_gradients(outer, narrow, mixed)
    sums = room(homes, hidden, ffn, dtype=single)
    apart = replace(mixed, sums=sums, spans=torch.empty(homes, 2, dtype=torch.int32))
    grouped.weight_gradients(outer, narrow, apart)
    if down_bias is not None:
        grouped.row_dots(outer, down_bias, scale)
    scale_rows(outer, scale, outer)
    scale_rows_backward(outer, outer, scale, scale)


def launch_quantised(
    homes: int, slots: int, hidden: int, ffn: int, biases: bool, machine: Any, rows: int = 4096
) -> None:
    """Weights and rows of eight bits, in every format, there and back."""
    import torch

    from ultraep.backends.triton import quantise
    from ultraep.backends.triton.blocks import multiplies_e4m3, table_for
    from ultraep.backends.triton.quantised import GroupedQuantised
    from ultraep.ops.formats import E4M3, FORMATS
    from ultraep.ops.products import Stacks
    from ultraep.ops.quantised import QuantisedStacks

    def stacks(*shape: int, dtype: Any = torch.bfloat16) -> Stacks:
        return Stacks(*(torch.empty(count, *shape, dtype=dtype) for count in (homes, slots)))

    native, table = multiplies_e4m3(*capability(machine)), table_for(*capability(machine))
    offsets = torch.empty(homes + slots + 1, dtype=torch.int32)
    grouped = GroupedQuantised(offsets, programs=132, table=table, native=native)
    outer, wide = (torch.empty(rows, width, dtype=torch.bfloat16) for width in (hidden, 2 * ffn))
    bias = stacks(hidden) if biases else None
    for form in FORMATS.values():
        scales = form.scale_shape((hidden, ffn))
        down = QuantisedStacks(
            stacks(hidden, ffn, dtype=E4M3), stacks(*scales, dtype=form.scale_type)
        )
        held = down.data.homes, down.scales.homes
        quantise.quantise(form, torch.empty(homes, hidden, ffn, dtype=torch.bfloat16), *held)
        quantise.dequantise(form, *held, torch.bfloat16)
        if form.packs:
            quantise.unpack(form, quantise.pack(form, outer), hidden, outer.dtype, offsets[-1:])
            packed = grouped.swiglu_quantise(form, wide)
            gates = torch.empty(rows) if biases else None
            grouped.multiply_quantised(form, packed, down, outer, bias=bias, scale=gates)


def launch_exchange(ranks: int, experts: int, slots: int, dtype: str, top_k: int) -> None:
    """Tokens to slots, and back with and without scalars."""
    from types import SimpleNamespace

    import torch

    from ultraep import Topology
    from ultraep.backends.triton.exchange import RegionLayout, RowExchange

    def room(*shape: int, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def region(num_bytes: int) -> Any:
        addresses = room(ranks, dtype=torch.int64)
        return SimpleNamespace(local=room(num_bytes, dtype=torch.uint8), addresses=addresses)

    tokens, width, capacity = 512, 7168, 8192
    first_slot = Topology(ranks=ranks, experts=experts, slots=slots).first_slot_of_rank
    layout = RegionLayout(
        first_slot_of_rank=first_slot, tokens=tokens, top_k=top_k, capacity=capacity
    )
    rows = room(capacity, width, dtype=getattr(torch, dtype))
    values, served = (region(layout.served_bytes(width * rows.itemsize)) for _ in range(2))
    exchange = RowExchange(layout, rank=0, tables=region(layout.table_bytes), programs=132)
    row_map, received = exchange.row_map(), room(ranks, exchange.num_local)
    scalars = room(tokens, top_k, dtype=torch.float32)
    routed = room(layout.rows)
    exchange.tables(room(layout.num_slots), received, row_map)
    exchange.expose(routed, scalars)
    exchange.expose_values(rows[:tokens], values)
    exchange.origins(received, row_map, room(capacity, dtype=torch.float32))
    exchange.landings(routed, routed, row_map)
    exchange.gather_rows(values, row_map, rows)
    exchange.sum_rows(served, row_map, rows[:tokens])
    exchange.sum_rows(served, row_map, rows[:tokens], scalars)


def launch_data(ranks: int, experts: int, slots: int, relay: str, dtype: str) -> None:
    """Loads, weights and gradients between ranks that reach each other's memory."""
    import torch

    from ultraep import Topology
    from ultraep.backends.triton.board import Board
    from ultraep.backends.triton.reducer import pull
    from ultraep.backends.triton.streamer import Streamer
    from ultraep.bundle import Layout
    from ultraep.runtime.mapped.peers import LocalPeers

    width = 4096
    peers = LocalPeers(ranks, "cpu").of(0)
    board = Board(peers, slots=slots, buffers=1, timeout=1.0)
    loads = torch.zeros(experts, dtype=torch.int32)
    board.share("loads", loads, board.region, loads)
    board.meet("rows")
    topology = Topology(ranks=ranks, experts=experts, slots=slots)
    streamer = Streamer(board, topology, relay=relay, programs=64)
    weights = {"w": torch.zeros(streamer.homes, width, dtype=getattr(torch, dtype))}
    layout = Layout.of(weights, streamer.homes)
    made = torch.zeros(streamer.size, dtype=torch.int32)
    rows = peers.allocate("rows", 64)
    streamer.schedule(torch.zeros(streamer.copies, 3, dtype=torch.int32), layout, made)
    streamer.fill(made, layout, weights, rows)
    for zero in (False, True):
        pull(weights["w"], rows, made, streamer, programs=528, zero=zero)
        pull(weights["w"], rows, made, streamer, programs=8, large=True)


def fixed(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the kernel is compiled for, arguments that are not given among them."""
    names = [p.name for p in kernel.params if p.is_constexpr or arguments[p.name] is None]
    return {name: arguments[name] for name in names}


def signature(kernel: Any, arguments: dict[str, Any]) -> dict[str, str]:
    known = fixed(kernel, arguments)
    names = [p.name for p in kernel.params]
    return {n: "constexpr" if n in known else type_of(arguments[n]) for n in names}


def type_of(argument: Any) -> str:
    return TYPES[str(argument.dtype)] if hasattr(argument, "dtype") else "i32"


def aligned(kernel: Any, arguments: dict[str, Any]) -> dict[tuple[int], list[list[object]]]:
    """The pointers and numbers that a launch would find to be divisible by 16."""

    def divisible(param: Any) -> bool:
        argument = arguments[param.name]
        if param.is_constexpr or param.do_not_specialize_on_alignment or argument is None:
            return False
        if hasattr(argument, "data_ptr"):
            return argument.data_ptr() % 16 == 0
        return not param.do_not_specialize and argument % 16 == 0

    return {(p.num,): [["tt.divisibility", 16]] for p in kernel.params if divisible(p)}


def resources(made: Any) -> tuple[int, int]:
    """Registers of a thread, and how much of them is spilled: bytes, on AMD registers."""
    if "amdgcn" in made.asm:
        text = made.asm["amdgcn"]
        return number(r"\.vgpr_count:\s+(\d+)", text), number(r"\.vgpr_spill_count:\s+(\d+)", text)
    text = usage(made.asm["cubin"])
    return number(r"REG:(\d+)", text), number(r"STACK:(\d+)", text)


def widest_load(made: Any) -> int:
    """Bytes that a thread loads from global memory at once, at most; 0: it loads none."""
    if "amdgcn" in made.asm:
        loads = re.findall(r"(?:global|buffer|flat)_load_dword(?:x(\d))?\s", made.asm["amdgcn"])
        return max((4 * int(times or 1) for times in loads), default=0)
    loads = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\s", made.asm["ptx"])
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
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in {text}"
    return int(found[1])


if __name__ == "__main__":
    main()
