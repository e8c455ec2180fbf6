"""The whole demo: claim the folder, start the ranks or be one of torchrun's.

OUT/
|-- result.json                a `DemoResult`
|-- none/trace, ultraep/trace  the training under each policy, for `ultraep.read_trace`
|-- report.html                made of them
`-- .ultraep-demo              what of this a demo made, and whether one runs
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ultraep.errors import ConfigError
from ultraep.policies import get_policy
from ultraep.tools.demo.folder import DemoFolder
from ultraep.tools.demo.job import Job
from ultraep.tools.demo.result import DemoResult, Event
from ultraep.tools.launch.place import RankPlace
from ultraep.tools.launch.processes import run_ranks, stop_on_sigterm
from ultraep.tools.outputs import OutputDir


def run(
    job: Job,
    tell: Callable[[Event], None],
    place: RankPlace | None = None,
    claim: OutputDir | None = None,
) -> DemoResult:
    """Run the job on processes of this machine, or, with a place, as that rank of a group.

    tell: hears what goes on. On interruption all processes end, and the traces stay readable.
    claim: of the folder, by `prepare`. The result is returned, not saved.
    """
    if place is None:
        keep = [] if claim is None else [claim.lock]
        found: DemoResult = run_ranks(
            "ultraep.tools.demo.ranks:work", job, job.sizes.ranks, tell, keep
        )
        return found
    from ultraep.tools.demo.ranks import work  # torch, only in the processes of ranks

    stop_on_sigterm()
    return work(place, job, tell)


def prepare(job: Job, place: RankPlace | None = None) -> AbstractContextManager[OutputDir | None]:
    """Check the policies and claim the folder; of a group, rank 0 does that for all."""
    for name in job.policies:
        get_policy(name)
    if not job.policies or len(set(job.policies)) < len(job.policies):
        raise ConfigError(f"policies must differ, got {', '.join(job.policies)}")
    if place is not None and place.rank:
        return nullcontext()
    return DemoFolder(job.out, job.policies)
