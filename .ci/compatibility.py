"""Run tests with several versions of Python, torch and libraries; print tables for the docs.

    make compatibility
    make compatibility PYTHONS='python3.12 python3.13' TORCHES='2.11.0 newest'
    make compatibility LIBRARIES='transformers megatron-core'

Every pair of Python and torch gets an environment of its own in build/compatibility, which is
removed afterwards. The other packages have the versions and hashes of requirements/dev.txt, except
those in `OLDER`. Libraries run in .venv, where a folder with another version shadows the installed
one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compatibility"
PYTHONS = ["python3.11", "python3.12", "python3.13"]
TORCHES = ["2.11.0", "2.13.0", "newest"]
TESTS = [
    *("test_golden.py", "test_promises.py", "story", "policies"),
    *("cli/test_plan.py", "parallel/test_gradients.py"),
    *("runtime/test_balancer.py", "runtime/test_communicators.py"),
]
# Oldest and newest version of each library, as in ultraep.supported, and its tests. vLLM has an
# environment of its own: make test-vllm.
LIBRARIES = {
    "transformers": (["5.17.0", "5.23.0"], ["integrations"]),
    "megatron-core": (["0.16.1", "0.19.2"], ["frameworks/megatron"]),
    "torchtitan": (["0.3.0"], ["frameworks/torchtitan"]),
}
OLDER = {"2.11.0": "numpy<2.4"}  # by version of torch, for the interpreter of its Triton
LIMIT = 1800.0  # seconds for one pair


class Unavailable(Exception):
    """A pair that cannot be installed here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", action="append", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", action="append", help=f"default: {' '.join(TORCHES)}")
    parser.add_argument(
        "--no-cuda-packages",
        action="store_true",
        help="install torch alone; libraries of CUDA that it loads are on LD_LIBRARY_PATH",
    )
    parser.add_argument("--library", action="append", help=f"default: {' '.join(LIBRARIES)}")
    args = parser.parse_args()
    passed = True
    if args.python or args.torch or not args.library:
        pairs = product(args.python or PYTHONS, args.torch or TORCHES)
        rows = (outcome(*pair, args.no_cuda_packages) for pair in pairs)
        passed &= print_table(["Python", "torch", "core tests"], rows)
    if args.library or not (args.python or args.torch):
        names = args.library or LIBRARIES
        rows = (with_library(name, v) for name in names for v in LIBRARIES[name][0])
        passed &= print_table(["library", "version", "its tests"], rows)
    sys.exit(not passed)


def print_table(head: list[str], rows: Iterable[tuple[list[str], bool]]) -> bool:
    """Print rows as they come; return whether all passed."""
    print(f"| {' | '.join(head)} |\n|---|---|---|", flush=True)
    results = []
    for row, passed in rows:
        results.append(passed)
        print(f"| {' | '.join(row)} |", flush=True)
    return all(results)


def with_library(name: str, version: str) -> tuple[list[str], bool]:
    """Return a row of the table for a library, and whether no test failed."""
    folder, python = FOLDER / f"{name}-{version}", ROOT / ".venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        run([*pip, "--target", folder, f"{name}=={version}"])
        words, passed = test(python, LIBRARIES[name][1], folder)
        return [name, version, words], passed
    except Unavailable as error:
        return [name, version, f"not run: {error}"], True
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def outcome(python: str, torch: str, alone: bool) -> tuple[list[str], bool]:
    """Return a row of the table, and whether no test failed."""
    command = shutil.which(python)
    if command is None:
        return [python.removeprefix("python"), torch, "not run: no such Python here"], True
    environment = FOLDER / f"{Path(python).name}-{torch}"
    try:
        binary = install(command, torch, environment, alone)
        versions = run([binary, "-c", "import platform; print(platform.python_version())"]).split()
        versions += run([binary, "-c", "import torch; print(torch.__version__)"]).split()
        words, passed = test(binary, TESTS, None)
        return [*versions, words], passed
    except Unavailable as error:
        return [Path(python).name.removeprefix("python"), torch, f"not run: {error}"], True
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def install(python: str, torch: str, environment: Path, alone: bool) -> Path:
    """Create an environment and return its Python."""
    run([python, "-m", "venv", environment])
    binary = environment / "bin" / "python"
    pip = [binary, "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--disable-pip-version-check"]
    wanted = "torch" if torch == "newest" else f"torch=={torch}"
    run([*pip, "--no-deps", "--require-hashes", "-r", ROOT / "requirements" / "dev.txt"])
    if torch in OLDER:
        run([*pip, "--no-deps", OLDER[torch]])
    run([*pip, *(["--no-deps"] if alone else []), wanted])
    if alone:
        code = "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')"
        lines = run([binary, "-c", code]).splitlines()
        run([*pip, "--no-deps", *(line.split(";")[0] for line in lines if "triton" in line)])
    run([*pip, "--no-deps", "--no-build-isolation", "-e", ROOT])
    return binary


def test(python: Path, names: list[str], library: Path | None) -> tuple[str, bool]:
    """Run the tests; return their closing line, and whether they passed.

    library: folder of packages that shadow those of the environment; None: none.
    """
    command = [python, "-m", "pytest", "-q", "-n", "0", "-m", "not slow and not long"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, (library, ROOT / "src"))))
    done = subprocess.run(
        [*command, *(ROOT / "tests" / name for name in names)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "last.log").write_text(done.stdout + done.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout)
    return ", ".join(counts) or "stopped before the first test", done.returncode == 0


def run(command: list[str | Path]) -> str:
    """Return the output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise Unavailable((lines or done.stderr.splitlines() or ["no output"])[-1])
    return done.stdout


if __name__ == "__main__":
    main()
