"""Write requirements/*.txt anew: the versions of this environment, with hashes of all their files.

    make lock

Hashes of all files of a version are listed, so that one lock serves every processor and Python.
torch is left out: its builds for CPUs and for CUDA differ, and come from different places. So are
the CUDA packages that a build of torch requires.
"""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
# Each file has what the files before it lack.
EXTRAS = {"dev": {"dev"}, "frameworks": {"dev", "megatron", "torchtitan"}}
ALONE = {"transformer-engine": "engine", "triton": "triton"}  # installed without dependencies
LEFT_OUT = {"torch", "ultraep"}
ONLY_LINUX = {"triton"}
HEADER = "# Written by `make lock`. Hashes of all files of each version; torch is not among them.\n"


def closure(name: str, extras: set[str], seen: dict[str, str]) -> None:
    """Add an installed package and all that it requires here to `seen`: versions by name."""
    package = distribution(name)
    if name not in LEFT_OUT:
        seen[name] = package.version
    for line in package.requires or []:
        required = Requirement(line)
        key = canonicalize_name(required.name)
        if needed(required.marker, extras) and (key not in seen or required.extras):
            closure(key, required.extras, seen)


def needed(marker: Marker | None, extras: set[str]) -> bool:
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""})


def lock(name: str, pins: dict[str, str]) -> None:
    """Write one file."""
    lines = [
        f"{package}=={version}" + (" ; sys_platform == 'linux'" if package in ONLY_LINUX else "")
        for package, version in sorted(pins.items())
    ]
    command = [sys.argv[1], "pip", "compile", "-", "--no-deps", "--universal", "--generate-hashes"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    command += ["--python-version", "3.11"]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    (FOLDER / f"{name}.txt").write_text(HEADER + done.stdout)
    print(f"requirements/{name}.txt: {len(pins)} packages")


def main() -> None:
    before: set[str] = set()
    for name, extras in EXTRAS.items():
        pins: dict[str, str] = {}
        closure("ultraep", extras, pins)
        lock(name, {package: pins[package] for package in pins.keys() - before})
        before |= pins.keys()
    for name, version in (word.split("==") for word in sys.argv[2:]):
        lock(ALONE[name], {name: version})


if __name__ == "__main__":
    main()
