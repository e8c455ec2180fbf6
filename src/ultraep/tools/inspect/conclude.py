"""All that was found, as one result."""

from __future__ import annotations

from ultraep import __version__
from ultraep.tools.inspect.catch import Catcher
from ultraep.tools.inspect.findings import Findings
from ultraep.tools.inspect.result import InspectionResult
from ultraep.tools.inspect.run import Inspection


def conclude(
    inspection: Inspection, caught: Catcher, findings: Findings, seconds: float
) -> InspectionResult:
    """Facts about the model and the run, and a row for every case."""
    opened, known = inspection.opened, inspection.estimate
    return InspectionResult(
        version=__version__,
        model=inspection.asked.name,
        family=opened.config.model_type,
        random=inspection.asked.family is not None,
        parameters=known.parameters,
        active=known.active,
        blocks=len(opened.anatomy.blocks),
        layers=findings.trace.layers.tolist(),
        experts=inspection.topology.experts,
        top_k=caught.top_k,
        dtype=str(opened.dtype).removeprefix("torch."),
        device=str(opened.device),
        texts=inspection.texts,
        window=max(window.size for one in inspection.excerpts for window in one.windows),
        sequence=inspection.excerpts[0].windows[0].shape[1],
        wall_seconds=seconds,
        notes=[*inspection.notes, *_missing(caught)],
        rows=findings.rows,
    )


def _missing(caught: Catcher) -> list[str]:
    if not caught.dropped:
        return []
    return [f"{caught.dropped} records were dropped: the disk was too slow"]
