"""Run the core tests with several versions of Python and torch; print a table for the docs.

    make compatibility
    make compatibility PYTHONS='python3.12 python3.13' TORCHES='2.11.0 newest'

Every pair gets an environment of its own in build/compatibility, which is removed afterwards. The
other packages have the versions and hashes of requirements/dev.txt, except those in `OLDER`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
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
    args = parser.parse_args()
    print("| Python | torch | core tests |\n|---|---|---|", flush=True)
    failed = False
    for python in args.python or PYTHONS:
        for torch in args.torch or TORCHES:
            row, passed = outcome(python, torch, args.no_cuda_packages)
            failed |= not passed
            print(f"| {' | '.join(row)} |", flush=True)
    sys.exit(failed)


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
        words, passed = test(binary)
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


def test(python: Path) -> tuple[str, bool]:
    """Run the tests; return their closing line, and whether they passed."""
    command = [python, "-m", "pytest", "-q", "-n", "0", "-m", "not slow and not long"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run(
        [*command, *(ROOT / "tests" / name for name in TESTS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
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
