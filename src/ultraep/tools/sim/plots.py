"""Plots of results: throughput, imbalance by layer, and the time of a microbatch by stage.

Needs matplotlib (pip install 'ultraep[plot]'). An .html page embeds the SVG.
"""

from __future__ import annotations

import html
import importlib
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.files.writing import MARKS, whole_file
from ultraep.tools.sim.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".html")
# Colour and stages of every part of a bar, from its bottom to its top.
PARTS = {
    "attention": ("#9aa5b1", "attention", "attention back"),
    "experts": ("#2f6db3", "experts", "experts back"),
    "dispatch, combine": ("#7fb2e5", "dispatch", "combine", "combine back", "dispatch back"),
    "recompute": ("#d7dde3", "recompute"),
    "loads, plan": ("#e8a33d", "loads", "plan"),
    "weights, gradients": ("#c8502d", "replicate", "reroute", "weights again", "reduce"),
}
POLICY_COLOURS = {"none": "#8b8f94", "eplb": "#c58b2a", "lplb": "#8a6bb8", "quota": "#3f8f6b"}
POLICY_COLOURS |= {"ultraep": "#2f6db3", "ideal": "#1c1f23"}
OTHER_COLOURS = ("#b3475f", "#5f9ea0", "#a0522d")
STYLE: dict[Any, Any] = {"font.size": 9, "axes.titlesize": 10, "svg.hashsalt": "ultraep"}
STYLE |= {"axes.spines.top": False, "axes.spines.right": False}
METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": "ultraep"},
    "svg": {"Date": None, "Creator": "ultraep"},
}


def check_plot(path: str | Path) -> None:
    """Raise if the file format is unknown or matplotlib is missing."""
    ending = Path(path).suffix.lower()
    if ending not in FORMATS:
        raise ConfigError(
            f"{path}: a plot must end in {', '.join(FORMATS)}, got {ending or 'no ending'}"
        )
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise BackendUnavailable(
            f"plots need matplotlib ({error}): pip install 'ultraep[plot]'"
        ) from None


def write_plot(
    path: str | Path, title: str, results: Sequence[Result], *, ideal: float, first_layer: int = 0
) -> None:
    """Write a plot in the format of the file name. ideal: throughput of forced balance."""
    check_plot(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ending = Path(path).suffix.lower()
    image_format, image = "png" if ending == ".png" else "svg", io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        throughput, imbalance, stages = figure.subplots(1, 3)
        figure.suptitle(title, fontsize=11)
        spare = itertools.cycle(OTHER_COLOURS)
        colours = [POLICY_COLOURS.get(result.label) or next(spare) for result in results]
        _draw_throughput(throughput, results, colours, ideal)
        _draw_imbalance(imbalance, results, colours, first_layer)
        _draw_stages(stages, results)
        for axes in (imbalance, stages):
            axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        figure.savefig(image, format=image_format, dpi=150, metadata=METADATA[image_format])
    content = image.getvalue()
    if ending == ".html":
        head = f'<!doctype html><html><head>{MARKS["page"].decode()}<meta charset="utf-8">'
        head += f"<title>{html.escape(title)}</title></head><body>"
        content = head.encode() + content[content.index(b"<svg") :] + b"</body></html>"
    with whole_file(path) as file:
        file.write(content)


def _draw_throughput(
    axes: Axes, results: Sequence[Result], colours: list[str], ideal: float
) -> None:
    bars = axes.bar([r.label for r in results], [r.throughput for r in results], color=colours)
    axes.bar_label(bars, [f"{r.throughput / ideal:.0%}" for r in results], padding=2)
    axes.set_title("Throughput, and its share of forced balance")
    axes.set_ylabel(results[0].unit)
    axes.margins(y=0.1)


def _draw_imbalance(
    axes: Axes, results: Sequence[Result], colours: list[str], first_layer: int
) -> None:
    for result, colour in zip(results, colours, strict=True):
        layers = first_layer + np.arange(len(result.imbalance_by_layer))
        axes.plot(layers, result.imbalance_by_layer, color=colour, label=result.label)
    axes.set_title("Busiest rank over mean rank, by layer")
    axes.set_xlabel("layer")
    axes.set_ylabel("imbalance, mean over microbatches")


def _draw_stages(axes: Axes, results: Sequence[Result]) -> None:
    bottom = np.zeros(len(results))
    for part, (colour, *names) in PARTS.items():
        values = [1e3 * sum(r.stages.get(name, 0.0) for name in names) for r in results]
        if any(values):
            labels = [result.label for result in results]
            axes.bar(labels, values, bottom=bottom, color=colour, label=part)
            bottom += values
    axes.set_title("A microbatch through all layers")
    axes.set_ylabel("ms")
    axes.set_ylim(0, 1.05 * bottom.max())
