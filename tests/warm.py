"""Start processes with torch already imported.

A fork server of `multiprocessing` imports the modules once and forks every process. It ends with
this process and its children. Except on Linux, where forking is safe, each process imports them.

    process = warm.start(work, 42)                    # work(42), elsewhere
    done = warm.run("benchmarks/bench_plan.py", "--toy")   # as subprocess.run would
"""

import atexit
import functools
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

FORKS = sys.platform == "linux"
CONTEXT = multiprocessing.get_context("forkserver" if FORKS else "spawn")
MODULES = ["warm_modules"]  # imported by the fork server


def preload(*modules: str) -> None:
    """Let the fork server import these modules, too, unless it has started."""
    MODULES[:0] = modules


def start(work: Callable[..., Any], *args: Any, **environment: str) -> BaseProcess:
    """Start a process that calls `work(*args)`, in this environment plus `environment`."""
    if FORKS:
        start_server()
    own = os.environ | environment
    process = CONTEXT.Process(target=in_environment, args=(dict(own), work, args))
    process.start()
    return process


@functools.cache
def start_server() -> None:
    with pytest.MonkeyPatch.context() as patch:  # Python 3.11 does not pass sys.path
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        CONTEXT.set_forkserver_preload(MODULES)
        forkserver.ensure_running()


@atexit.register
def end_all() -> None:
    """Kill processes that failed tests left behind; `multiprocessing` would wait for them."""
    for process in multiprocessing.active_children():
        process.kill()


def in_environment(environment: dict[str, str], work: Callable[..., Any], args: tuple) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import_module("warm_modules")  # already imported by the server
    try:
        work(*args)
    finally:
        atexit._run_exitfuncs()  # forked processes do not run them


class Program:
    """A process whose output is captured."""

    def __init__(self, work: Callable[..., Any], *args: Any, **environment: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("out", "err")]
        for file in self._files:
            file.touch()
        self.process = start(printing, self._files, work, args, **environment)

    def output(self) -> list[str]:
        """Return stdout and stderr so far."""
        return [file.read_text() for file in self._files]

    def wait_for(self, words: str) -> None:
        while words not in self.output()[0]:
            assert self.process.is_alive(), self.output()[1]
            time.sleep(0.01)

    def finish(self, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Wait for the process and return its result; kill it after `timeout` seconds."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        with self._folder:
            return subprocess.CompletedProcess((), self.process.exitcode, *self.output())


def run(script: str | Path, *options: str) -> subprocess.CompletedProcess[str]:
    return Program(as_program, str(script), options).finish()


def run_ranks(
    count: int, script: str | Path, *options: str, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script on several ranks, like torchrun; return the result of rank 0."""
    programs = start_ranks(count, as_program, str(script), options)
    first, *_ = [program.finish(timeout) for program in programs]
    return first


def start_ranks(
    count: int, work: Callable[..., Any], *args: Any, **environment: str
) -> list[Program]:
    """Start ranks with the environment that torchrun sets, plus `environment`."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(count)}
    group |= {"GLOO_SOCKET_IFNAME": "lo", **environment}
    return [
        Program(work, *args, **group, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)
    ]


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def printing(files: list[Path], work: Callable[..., Any], args: tuple) -> None:
    for descriptor, file in enumerate(files, start=1):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), descriptor)
    work(*args)


def as_program(script: str, options: tuple[str, ...]) -> None:
    """Run a script. Its ranks are forked from this process, which has already imported torch."""
    spawn = import_module("torch.multiprocessing.spawn")  # its package has a function of that name
    start_processes = spawn.start_processes

    def fork(*args: Any, start_method: str, **options: Any) -> Any:
        return start_processes(*args, start_method="fork" if FORKS else start_method, **options)

    spawn.start_processes = fork
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
