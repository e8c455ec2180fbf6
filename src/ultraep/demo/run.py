"""The whole demo: prepare the folder, start the ranks or be one of torchrun's, save the result.

OUT/
|-- result.json                a `DemoResult`
|-- none/trace, ultraep/trace  the training under each policy, for `ultraep.read_trace`
`-- report.html                made of them
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ultraep.demo.job import Job, Place
from ultraep.demo.processes import run_ranks, stop_on_sigterm
from ultraep.demo.result import RESULT_FILE, DemoResult, Event, trace_folder
from ultraep.errors import ConfigError, FileError
from ultraep.policies import get_policy


def run(job: Job, tell: Callable[[Event], None], place: Place | None = None) -> DemoResult:
    """Run the job on processes of this machine, or, with a place, as that rank of a group.

    tell: hears what goes on. On interruption all processes end, and the traces stay readable.
    The folder is one that `prepare` has made.
    """
    if place is None:
        result = run_ranks(job, job.sizes.ranks, tell)
    else:
        from ultraep.demo.ranks import work  # torch, only in the processes of ranks

        stop_on_sigterm()
        result = work(place, job, tell)
    if place is None or place.rank == 0:
        result.save(Path(job.out))
    return result


def prepare(job: Job, place: Place | None = None) -> None:
    """Check the policies, make the folder, remove what an earlier demo left there, nothing else."""
    for name in job.policies:
        get_policy(name)
    if not job.policies or len(set(job.policies)) < len(job.policies):
        raise ConfigError(f"policies must differ, got {', '.join(job.policies)}")
    if place is None or place.rank == 0:
        _clear(Path(job.out), job.policies)


def _clear(folder: Path, policies: Sequence[str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        (folder / RESULT_FILE).unlink(missing_ok=True)
        for policy in policies:
            trace = trace_folder(folder, policy)
            if trace.exists():
                shutil.rmtree(trace)
    except OSError as error:
        raise FileError(f"{folder}: cannot be written to: {error.strerror}") from None
