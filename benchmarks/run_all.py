"""All benchmarks that this machine can run, one after the other: `make bench`.

    python benchmarks/run_all.py --quick    # options go to every benchmark

What cannot run here is told first, in a line each, with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
NEEDS = {  # the others run anywhere
    "bench_control.py": ("a GPU",),
    "bench_grouped.py": ("a GPU", "cuda-python"),
    "bench_layer_gpu.py": ("a GPU", "cuda-python"),
    "bench_plan.py": ("scipy",),
    "bench_single.py": ("a GPU",),
}
# Of these, sections that need nothing run anywhere.
ANYWHERE = {"bench_transfer.py": ["--only", "copy,critical"]}


def here() -> dict[str, bool]:
    """What this machine has."""
    return {
        "a GPU": torch.cuda.is_available(),
        "cuda-python": find_spec("cuda") is not None,
        "scipy": find_spec("scipy") is not None,
    }


def chosen(has: Mapping[str, bool]) -> tuple[dict[str, list[str]], list[str]]:
    """The options of every script that can run; and of those that cannot, why."""
    runs: dict[str, list[str]] = {}
    left_out = []
    for script in sorted(path.name for path in HERE.glob("bench_*.py")):
        lacking = [need for need in NEEDS.get(script, ()) if not has[need]]
        if lacking:
            left_out.append(f"{script} is left out: it needs {' and '.join(lacking)}")
            continue
        runs[script] = [] if has["a GPU"] else ANYWHERE.get(script, [])
        if runs[script]:
            left_out.append(f"{script} runs with {' '.join(runs[script])}: the rest needs a GPU")
    return runs, left_out


def main(options: Sequence[str]) -> None:
    runs, left_out = chosen(here())
    print(*left_out, sep="\n", flush=True)
    failed = []
    for script, own in runs.items():
        print(f"\n== {script}", flush=True)
        done = subprocess.run([sys.executable, str(HERE / script), *own, *options], check=False)
        failed += [script] if done.returncode else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
