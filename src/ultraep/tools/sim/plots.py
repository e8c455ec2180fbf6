"""Results as pictures: throughput, imbalance by layer, and where the time of a microbatch goes.

.png and .svg are drawn by matplotlib, .html by plotly, with all that it needs inside of the file.
Both packages are optional: pip install 'ultraep[plot]'.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultraep.errors import BackendUnavailable, ConfigError
from ultraep.files.writing import MARKS, whole_file, write_text
from ultraep.tools.sim.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ENDINGS = {".png": "matplotlib", ".svg": "matplotlib", ".html": "plotly"}
# Stages that belong together, from the bottom of a bar to its top.
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
THROUGHPUT, IMBALANCE, STAGES = (
    "Throughput, and its share of forced balance",
    "Fullest rank over mean rank, by layer",
    "A microbatch through all layers",
)


@dataclass(frozen=True)
class Picture:
    """What is drawn."""

    title: str
    results: Sequence[Result]
    ideal: float  # throughput of forced balance
    first_layer: int = 0

    @property
    def labels(self) -> list[str]:
        """Names of the policies."""
        return [result.label for result in self.results]

    @property
    def throughputs(self) -> list[float]:
        """What each policy reaches."""
        return [result.throughput for result in self.results]

    @property
    def shares(self) -> list[str]:
        """Parts of forced balance, as written on the bars."""
        return [f"{result.throughput / self.ideal:.0%}" for result in self.results]

    @property
    def colours(self) -> list[str]:
        """A colour for each policy."""
        others = [label for label in self.labels if label not in POLICY_COLOURS]
        return [
            POLICY_COLOURS.get(label) or OTHER_COLOURS[others.index(label) % len(OTHER_COLOURS)]
            for label in self.labels
        ]

    def layers(self, result: Result) -> list[int]:
        """Numbers of the layers with experts."""
        count = len(result.imbalance_by_layer)
        return list(range(self.first_layer, self.first_layer + count))

    def parts(self) -> dict[str, list[float]]:
        """Milliseconds of every part that there is, by policy."""
        found = {
            part: [
                1e3 * sum(result.stages.get(name, 0.0) for name in names) for result in self.results
            ]
            for part, names in PARTS.items()
        }
        return {part: values for part, values in found.items() if any(values)}


def check_plot(path: str | Path) -> None:
    """Refuse an ending that nobody can draw, and say which package is missing."""
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(
            f"{path}: a picture ends in {', '.join(ENDINGS)}, got {ending or 'no ending'}"
        )
    package = ENDINGS[ending]
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise BackendUnavailable(
            f"{ending} pictures need {package} ({error}): pip install 'ultraep[plot]'"
        ) from None


def write_plot(path: str | Path, picture: Picture) -> None:
    """Draw it in the format that the name asks for."""
    check_plot(path)
    if ENDINGS[Path(path).suffix.lower()] == "plotly":
        _write_html(path, picture)
    else:
        _write_image(path, picture)


# -- matplotlib ----------------------------------------------------------------------------------


def _write_image(path: str | Path, picture: Picture) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "ultraep",
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        throughput, imbalance, stages = figure.subplots(1, 3)
        figure.suptitle(picture.title, fontsize=11)
        _draw_throughput(throughput, picture)
        _draw_imbalance(imbalance, picture)
        _draw_stages(stages, picture)
        form = Path(path).suffix.lower().lstrip(".")
        made_by = {"Date": None, "Creator": "ultraep"} if form == "svg" else {"Software": "ultraep"}
        with whole_file(path) as file:
            figure.savefig(file, format=form, dpi=150, metadata=made_by)


def _draw_throughput(axes: Axes, picture: Picture) -> None:
    bars = axes.bar(picture.labels, picture.throughputs, color=picture.colours)
    axes.bar_label(bars, picture.shares, padding=2)
    axes.set_title(THROUGHPUT)
    axes.set_ylabel(picture.results[0].unit)
    axes.margins(y=0.1)


def _draw_imbalance(axes: Axes, picture: Picture) -> None:
    for result, colour in zip(picture.results, picture.colours, strict=True):
        axes.plot(
            picture.layers(result), result.imbalance_by_layer, color=colour, label=result.label
        )
    axes.set_title(IMBALANCE)
    axes.set_xlabel("layer")
    axes.set_ylabel("imbalance, mean over microbatches")
    _legend_below(axes, 3)


def _draw_stages(axes: Axes, picture: Picture) -> None:
    below = [0.0] * len(picture.results)
    colours = dict(zip(PARTS, PART_COLOURS, strict=True))
    for part, values in picture.parts().items():
        axes.bar(picture.labels, values, bottom=below, color=colours[part], label=part)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_title(STAGES)
    axes.set_ylabel("ms")
    axes.set_ylim(0, 1.05 * max(below))
    _legend_below(axes, 3)


def _legend_below(axes: Axes, columns: int) -> None:
    axes.legend(frameon=False, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.12))


# -- plotly --------------------------------------------------------------------------------------


def _write_html(path: str | Path, picture: Picture) -> None:
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=1, cols=3, subplot_titles=(THROUGHPUT, IMBALANCE, STAGES))
    for column, traces in enumerate((_bars(picture), _lines(picture), _stacks(picture)), start=1):
        for trace in traces:
            figure.add_trace(trace, row=1, col=column)
    figure.update_layout(title=picture.title, barmode="stack", template="plotly_white")
    figure.update_yaxes(title_text=picture.results[0].unit, row=1, col=1)
    figure.update_yaxes(title_text="imbalance", row=1, col=2)
    figure.update_xaxes(title_text="layer", row=1, col=2)
    figure.update_yaxes(title_text="ms", row=1, col=3)
    page = figure.to_html(include_plotlyjs=True, full_html=True)
    write_text(path, page.replace("<head>", f"<head>{MARKS['page'].decode()}", 1))


def _bars(picture: Picture) -> list[Any]:
    from plotly.graph_objects import Bar

    bar = Bar(
        x=picture.labels,
        y=picture.throughputs,
        text=picture.shares,
        textposition="outside",
        marker_color=picture.colours,
        showlegend=False,
    )
    return [bar]


def _lines(picture: Picture) -> list[Any]:
    from plotly.graph_objects import Scatter

    return [
        Scatter(
            x=picture.layers(result),
            y=result.imbalance_by_layer.tolist(),
            name=result.label,
            mode="lines",
            line_color=colour,
            legendgroup="policies",
            legendgrouptitle_text="policies",
        )
        for result, colour in zip(picture.results, picture.colours, strict=True)
    ]


def _stacks(picture: Picture) -> list[Any]:
    from plotly.graph_objects import Bar

    colours = dict(zip(PARTS, PART_COLOURS, strict=True))
    return [
        Bar(
            x=picture.labels,
            y=values,
            name=part,
            marker_color=colours[part],
            legendgroup="stages",
            legendgrouptitle_text="stages",
        )
        for part, values in picture.parts().items()
    ]
