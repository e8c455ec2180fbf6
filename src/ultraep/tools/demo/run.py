"""The whole demo: claim the folder, start the ranks or be one of torchrun's.

OUT/
|-- result.json                a `DemoResult`
|-- none/trace, ultraep/trace  the training under each policy, for `ultraep.read_trace`
|-- report.html                made of them
`-- .ultraep-demo              what of this a demo made, and whether one runs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep.tools.demo.result import REPORT_FILE, RESULT_FILE, TRACE, DemoResult, Event
from ultraep.tools.demo.sizes import Job
from ultraep.tools.launch.processes import RankPlace, run_ranks, stop_on_sigterm
from ultraep.tools.outputs import OutputDir


def run(
    job: Job,
    tell: Callable[[Event], None],
    place: RankPlace | None = None,
    claim: OutputDir | None = None,
) -> DemoResult:
    """Run the job on processes of this machine, or, with a place, as that rank of a group.

    tell: called with every event. On interruption all processes end, and the traces stay readable.
    claim: of the folder, by `prepare`. The result is returned, not saved.
    """
    if place is None:
        keep = [] if claim is None else [claim.lock]
        work = "ultraep.tools.demo.ranks:work"
        result: DemoResult = run_ranks(work, job, job.sizes.ranks, tell, keep)
        return result
    from ultraep.tools.demo.ranks import work as work_as_rank  # torch, only in processes of ranks

    stop_on_sigterm()
    return work_as_rank(place, job, tell)


def prepare(job: Job, place: RankPlace | None = None) -> AbstractContextManager[OutputDir | None]:
    """Check the policies and claim the folder; rank 0 of a group claims it for all."""
    for name in job.policies:
        get_policy(name)
    if not job.policies or len(set(job.policies)) < len(job.policies):
        raise ConfigError(f"policies must differ, got {', '.join(job.policies)}")
    if place is not None and place.rank:
        return nullcontext()
    return claim_folder(job.out, job.policies)


def claim_folder(out: str | Path, policies: Sequence[str]) -> OutputDir:
    """OutputDir the folder for result, report and a trace of each policy."""
    traces = [f"{policy}/{TRACE}" for policy in policies]
    return OutputDir(out, work="demo", files=(RESULT_FILE, REPORT_FILE), traces=traces)
