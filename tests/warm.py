"""Processes that start with their modules loaded: importing torch takes longer than most of them.

A server of `multiprocessing` imports what they need, once for this process, and forks them from
itself. It ends when this process and all of them have ended. Where forks are not safe, which is
anywhere but on Linux, each imports for itself.

    process = warm.start(work, 42)                    # work(42), elsewhere
    done = warm.run("benchmarks/bench_plan.py", "--toy")   # as subprocess.run would
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

FORKS = sys.platform == "linux"
CONTEXT = multiprocessing.get_context("forkserver" if FORKS else "spawn")
CONTEXT.set_forkserver_preload(["warm_modules"])


def start(work: Callable[..., Any], *args: Any) -> BaseProcess:
    """A process that does this work in the environment of this one, as it is now."""
    if FORKS:
        start_server()
    process = CONTEXT.Process(target=in_environment, args=(dict(os.environ), work, args))
    process.start()
    return process


@functools.cache
def start_server() -> None:
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 tells it of no other path
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()


def in_environment(environment: dict[str, str], work: Callable[..., Any], args: tuple) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import_module("warm_modules")  # the server has it
    try:
        work(*args)
    finally:
        atexit._run_exitfuncs()  # as at the end of an interpreter, which a fork does not come to


def run(script: str | Path, *options: str) -> subprocess.CompletedProcess[str]:
    """What a program of Python prints, and the code with which it leaves."""
    with tempfile.TemporaryDirectory() as name:
        out, err = Path(name) / "out", Path(name) / "err"
        process = start(as_program, str(script), options, out, err)
        process.join()
        command = [str(script), *options]
        return subprocess.CompletedProcess(
            command, process.exitcode, out.read_text(), err.read_text()
        )


def as_program(script: str, options: tuple[str, ...], out: Path, err: Path) -> None:
    for file, descriptor in ((out, 1), (err, 2)):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), descriptor)
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
