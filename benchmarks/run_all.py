"""Run all benchmarks that this machine can run, one after the other: `make bench`.

    python benchmarks/run_all.py --quick    # fewer sizes

Scripts that cannot run here are named first, with the reason.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from harness import installed
from mps import CONTROL

HERE = Path(__file__).resolve().parent
NEEDS = {  # all other scripts run anywhere
    "bench_control.py": ("a GPU",),
    "bench_fp8.py": ("a GPU",),
    "bench_frameworks.py": ("transformers",),
    "bench_grouped.py": ("a GPU",),
    "bench_plan.py": ("scipy",),
    "bench_prefill.py": ("transformers",),
    "bench_public.py": ("a GPU",),
    "bench_ranks_gpu.py": ("a GPU", "CUDA MPS"),
}
OPTIONAL = ("scipy", "transformers")


def available() -> dict[str, bool]:
    """Which requirements this machine meets."""
    known = {"a GPU": torch.cuda.is_available(), "CUDA MPS": shutil.which(CONTROL) is not None}
    return known | {name: installed(name) for name in OPTIONAL}


def select_scripts(has: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The scripts that can run, and a line with the reason for each of the others."""
    runs, skipped = [], []
    for script in sorted(path.name for path in HERE.glob("bench_*.py")):
        lacking = [need for need in NEEDS.get(script, ()) if not has[need]]
        if lacking:
            skipped.append(f"{script} is skipped: it needs {' and '.join(lacking)}")
        else:
            runs.append(script)
    return runs, skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    size = parser.add_mutually_exclusive_group()
    for name in ("--toy", "--quick"):
        size.add_argument(name, dest="size", action="store_const", const=[name], default=[])
    options = parser.parse_args()
    runs, skipped = select_scripts(available())
    print(*skipped, sep="\n", flush=True)
    failed = []
    for script in runs:
        print(f"\n== {script}", flush=True)
        command = [sys.executable, str(HERE / script), *options.size]
        failed += [script] if subprocess.run(command, check=False).returncode else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
