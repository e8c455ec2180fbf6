"""Plots of results: throughput, imbalance by layer, and the time of a microbatch by stage.

Needs matplotlib (pip install 'ultraep[plot]'). An .html page embeds the SVG.
"""

from __future__ import annotations

import html
import importlib
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.files.writing import MARKS, whole_file
from ultraep.tools.sim.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".html")
# Groups of stages and their colours, from the bottom of a bar to its top.
PARTS = {
    "attention": ("attention", "attention back"),
    "experts": ("experts", "experts back"),
    "dispatch, combine": ("dispatch", "combine", "combine back", "dispatch back"),
    "recompute": ("recompute",),
    "loads, plan": ("loads", "plan"),
    "weights, gradients": ("replicate", "reroute", "weights again", "reduce"),
}
PART_COLOURS = ("#9aa5b1", "#2f6db3", "#7fb2e5", "#d7dde3", "#e8a33d", "#c8502d")
POLICY_COLOURS = {
    "none": "#8b8f94",
    "eplb": "#c58b2a",
    "lplb": "#8a6bb8",
    "quota": "#3f8f6b",
    "ultraep": "#2f6db3",
    "ideal": "#1c1f23",
}
OTHER_COLOURS = ("#b3475f", "#5f9ea0", "#a0522d")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "ultraep",
}
METADATA: dict[str, dict[str, str | None]] = {
    "png": {"Software": "ultraep"},
    "svg": {"Date": None, "Creator": "ultraep"},
}


@dataclass(frozen=True)
class Picture:
    """The data of a plot."""

    title: str
    results: Sequence[Result]
    ideal: float  # throughput of forced balance
    first_layer: int = 0

    @property
    def shares(self) -> list[str]:
        """Shares of forced balance, as labels of the bars."""
        return [f"{result.throughput / self.ideal:.0%}" for result in self.results]

    def parts(self) -> dict[str, list[float]]:
        """Return the milliseconds of every part that takes any time, by policy."""
        parts = {
            part: [1e3 * sum(r.stages.get(name, 0.0) for name in names) for r in self.results]
            for part, names in PARTS.items()
        }
        return {part: values for part, values in parts.items() if any(values)}


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


def write_plot(path: str | Path, picture: Picture) -> None:
    """Write a plot in the format of the file name."""
    check_plot(path)
    ending = Path(path).suffix.lower()
    content = _draw(picture, "png" if ending == ".png" else "svg")
    if ending == ".html":
        head = f'<!doctype html><html><head>{MARKS["page"].decode()}<meta charset="utf-8">'
        head += f"<title>{html.escape(picture.title)}</title></head><body>"
        content = head.encode() + content[content.index(b"<svg") :] + b"</body></html>"
    with whole_file(path) as file:
        file.write(content)


def _draw(picture: Picture, image_format: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    image = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        throughput, imbalance, stages = figure.subplots(1, 3)
        figure.suptitle(picture.title, fontsize=11)
        labels = [result.label for result in picture.results]
        spare = itertools.cycle(OTHER_COLOURS)
        colours = [POLICY_COLOURS.get(label) or next(spare) for label in labels]
        _draw_throughput(throughput, picture, labels, colours)
        _draw_imbalance(imbalance, picture, colours)
        _draw_stages(stages, picture, labels)
        for axes in (imbalance, stages):
            axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        figure.savefig(image, format=image_format, dpi=150, metadata=METADATA[image_format])
    return image.getvalue()


def _draw_throughput(axes: Axes, picture: Picture, labels: list[str], colours: list[str]) -> None:
    throughputs = [result.throughput for result in picture.results]
    bars = axes.bar(labels, throughputs, color=colours)
    axes.bar_label(bars, picture.shares, padding=2)
    axes.set_title("Throughput, and its share of forced balance")
    axes.set_ylabel(picture.results[0].unit)
    axes.margins(y=0.1)


def _draw_imbalance(axes: Axes, picture: Picture, colours: list[str]) -> None:
    for result, colour in zip(picture.results, colours, strict=True):
        layers = picture.first_layer + np.arange(len(result.imbalance_by_layer))
        axes.plot(layers, result.imbalance_by_layer, color=colour, label=result.label)
    axes.set_title("Busiest rank over mean rank, by layer")
    axes.set_xlabel("layer")
    axes.set_ylabel("imbalance, mean over microbatches")


def _draw_stages(axes: Axes, picture: Picture, labels: list[str]) -> None:
    bottom = np.zeros(len(picture.results))
    colours = dict(zip(PARTS, PART_COLOURS, strict=True))
    for part, values in picture.parts().items():
        axes.bar(labels, values, bottom=bottom, color=colours[part], label=part)
        bottom += values
    axes.set_title("A microbatch through all layers")
    axes.set_ylabel("ms")
    axes.set_ylim(0, 1.05 * bottom.max())
