"""Small jobs for tests, and the processes of a run."""

import os
import signal
import subprocess
import time
from pathlib import Path

from cli import commands

from ultraep_tools.demo.sizes import Job, Sizes

LIMIT = 300.0  # seconds; reached only by a program that hangs
TINY = {"ranks": 2, "experts": 8, "top_k": 2, "layers": 2, "hidden": 16, "ffn": 32, "heads": 2}
TINY |= {"tokens": 128, "length": 32, "steps": 6, "requests": 12, "longest": 64, "rounds": 1}
TINY |= {"layer_rounds": 1}


def tiny_job(out, policies=("none", "ultraep"), **sizes):
    return Job(Sizes(**(TINY | sizes)), tuple(policies), str(out))


def start(*command, **environment):
    """Start a program in a session of its own, with its output as text."""
    environment = {"OMP_NUM_THREADS": "1"} | environment
    options = {"stdout": subprocess.PIPE, "start_new_session": True}
    return commands.start(program=command, environment=environment, **options)


def wait_for_line(process, words):
    """Read the errors up to a line with these words; return all lines."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if words in line:
            return lines
    raise AssertionError(f"{''.join(lines)}\n{process.communicate()}")


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def alive(pids):
    """Return the processes that still run; a zombie does not."""
    running = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        try:
            if stat.read_text().rpartition(")")[2].split()[0] != "Z":
                running.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return running


def gone(pids, patience=60.0):
    """Return whether all processes end in time; kill the rest."""
    until = time.monotonic() + patience
    while alive(pids) and time.monotonic() < until:
        time.sleep(0.05)
    left = alive(pids)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return not left
