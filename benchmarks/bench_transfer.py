"""Weights and gradients between ranks: how fast, beside a plain copy of as many bytes.

    python benchmarks/bench_transfer.py                       # needs a GPU; two minutes
    python benchmarks/bench_transfer.py --only relay,reduce   # some sections
    python benchmarks/bench_transfer.py --only critical       # needs no GPU
    python benchmarks/bench_transfer.py --toy                 # tiny, for CI; also without a GPU

All ranks are ranks of one process on one device, and one launch streams for all of them: what is
measured is the kernels and the memory of one device, not a link between two. What a link would make
of it is a model, and its table says so. Every transfer is compared, bit by bit, with what it should
bring: before each timed launch its target is overwritten, after the last one it is read.

Shapes: C copies, R ranks, H home experts, P parameters of an expert.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from harness import Line, common_options, section_option
from timing import Clock, Gpu, Host, on_gpu
from transfer_gradients import reduce
from transfer_plans import critical, meet, schedule
from transfer_scale import FULL, QUICK, RATE, TIME, TOY, TransferBench, tera
from transfer_weights import direct, relay


def copy(bench: TransferBench) -> None:
    """The floor of the other sections."""
    lines = []
    for experts in (1, bench.scale.ranks):
        size = experts * bench.scale.layout.nbytes
        us = bench.copy_us(size)
        case = {"experts": experts, "MB": round(size / 1e6, 3)}
        lines.append(Line(case, {TIME: us, RATE: 2e-6 * size / us}))
    bench.table("copy: tensor.copy_ within the device; TB/s count bytes read and written", lines)
    bench.report.note(
        f"The last line is the floor of the sections direct and reduce: {tera(bench.copy_rate)}."
    )


SECTIONS = {
    "copy": copy,
    "direct": direct,
    "relay": relay,
    "critical": critical,
    "reduce": reduce,
    "schedule": schedule,
    "meet": meet,
}
AT_ONCE = "needs a GPU: its ranks must run at once, which the interpreter does not"
SLOW = "needs a GPU; without one, only --toy runs it (Triton's interpreter)"
WITHOUT_GPU = {
    **dict.fromkeys(("direct", "relay", "meet"), AT_ONCE),
    **dict.fromkeys(("reduce", "schedule"), SLOW),
}


def main(argv: Sequence[str]) -> None:
    """Run the sections, print their tables, and write their rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    common_options(parser)
    section_option(parser, SECTIONS)
    options = parser.parse_args(argv[1:])
    gpu = on_gpu(toy=True)  # some sections need none
    torch.manual_seed(0)
    clock: Clock = Gpu() if gpu else Host()
    scale = TOY if options.toy else QUICK if options.quick else FULL
    bench = TransferBench.of("transfer", argv, scale, clock, options.json)
    runs = []
    for name in options.only:
        why = "" if gpu else WITHOUT_GPU.get(name, "")
        if why and not (why == SLOW and options.toy):
            bench.report.note(f"\n{name}: {why}")
        else:
            runs.append(name)
    bench.run(SECTIONS, runs)


if __name__ == "__main__":
    main(sys.argv)
