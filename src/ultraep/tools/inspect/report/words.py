"""The words of the report, and those of the terminal: every figure comes from the findings."""

from __future__ import annotations

from ultraep.tools.inspect.findings import NONE, Findings, label, past_of
from ultraep.tools.inspect.result import InspectionResult, Row
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.report.words import counted, listed, table
from ultraep.trace.replay import Replayed

BEYOND_LIMITS = "moves homes or needs more slots than there are: compared here, not run"
HEAD = ("", "before", "before, worst", "after", "after, worst", "best possible", "copies", "remote")


def facts(result: InspectionResult) -> list[tuple[str, str]]:
    """The model and the run in short."""
    layers = f"{len(result.layers)} of {counted(result.blocks, 'layer')}"
    texts = [f"{text.name} ({text.tokens:,} tokens)" for text in result.texts]
    sizes = list(dict.fromkeys(row.ranks for row in result.rows))
    name = result.model if result.random else f"{result.model}, {result.family}"
    return [
        ("Model", f"{name}: {result.parameters / 1e6:,.1f} million "
                  f"parameters; {layers} looked at, {result.experts} experts in each, "
                  f"{result.top_k} of them for every token"),
        ("Texts", f"{listed(texts)}, in windows of {result.window:,} tokens and sequences of "
                  f"{result.sequence}"),
        ("Groups", f"{listed([f'EP{size}' for size in sizes])}: the tokens of a window are dealt "
                   "out evenly to so many ranks"),
        ("Machine", f"{result.device}, {result.dtype}, ultraep {result.version}; it took "
                    f"{result.wall_seconds:.0f} s"),
    ]  # fmt: skip


def result_table(result: InspectionResult) -> str:
    """A row for every size, policy and number of slots."""
    rows = [
        [
            _name(row),
            f"{row.before:.3f}",
            f"{row.before_worst:.3f}",
            f"{row.after:.3f}",
            f"{row.after_worst:.3f}",
            f"{row.bound:.3f}",
            f"{row.copies:.1f}",
            f"{100 * row.remote:.1f} %",
        ]
        for row in result.rows
    ]
    return table(HEAD, rows, "result")


def _name(row: Row) -> str:
    slots = "" if row.policy == NONE else f" with {counted(row.slots, 'slot')}"
    return f"EP{row.ranks} {row.policy}{'*' * bool(row.beyond)}{slots}"


# -- sentences -----------------------------------------------------------------------------------


def verdict(findings: Findings) -> list[str]:
    """What it comes to: of the group that is shown, and of placing by the past."""
    one, ranks = findings.shown, findings.sizes[0]
    found = [
        f"At EP{ranks} the fullest rank would have {one.before.mean():.2f} times the mean load "
        f"({one.before.max():.2f} at worst); {findings.shown_label} brings that to "
        f"{one.after.mean():.3f} with {one.copies.mean():.1f} copies per layer."
    ]
    stale = next((o for o in findings.of_size(ranks) if o.case.history), None)
    return found if stale is None else [*found, _of_past(findings, stale)]


def _of_past(findings: Findings, one: Replayed) -> str:
    assert one.case.history is not None
    same, changed = past_of(findings, one.case.history)
    past = one.case.history
    window = f"the last {past} windows" if past > 1 else "the window before"
    parts = [
        f"{words} it would stand at {one.after[mask].mean():.3f}"
        for words, mask in (("within a text", same), ("right after a change of text", changed))
        if mask.any()
    ]
    told = listed(parts) if parts else f"it would stand at {one.after.mean():.3f}"
    return f"{one.case.config.policy}, which places by {window}: {told}."


def sentences(findings: Findings, numbers: dict[str, Numbers]) -> dict[str, str]:
    """By plot: what to see in it."""
    first = verdict(findings)
    told = {
        "sizes": f"{first[0]} More ranks have fewer experts each, so a busy one weighs more.",
        "layers": _of_layers(findings),
        "texts": _of_texts(findings),
        "experts": "Load of every expert over the mean expert of its layer: 1 is its fair share. "
        "Texts that differ here need other copies.",
        "microbatches": _of_microbatches(findings, numbers["microbatches"]),
    }
    if "history" in numbers:
        told["history"] = _of_history(findings)
    return told


def _of_layers(findings: Findings) -> str:
    one, trace = findings.shown, findings.trace
    means = {layer: one.before[trace.layer == layer].mean() for layer in trace.layers.tolist()}
    worst, best = max(means, key=lambda n: means[n]), min(means, key=lambda n: means[n])
    return (
        f"At EP{findings.sizes[0]} layer {worst} is the most uneven one, {means[worst]:.2f} "
        f"without copies, and layer {best} the least, {means[best]:.2f}."
    )


def _of_texts(findings: Findings) -> str:
    one = findings.shown
    parts = [
        f"{one.before[findings.text == span.name].mean():.2f} with {span.name}"
        for span in findings.texts
    ]
    return f"Without copies, at EP{findings.sizes[0]}, the imbalance is {listed(parts)}."


def _of_history(findings: Findings) -> str:
    by_past = [one for one in findings.of_size(findings.sizes[0]) if one.case.history]
    told = _of_past(findings, by_past[0])
    return (
        f"At EP{findings.sizes[0]}, {told} {findings.shown_label} plans by the loads of the window "
        "itself, so a change of text does not matter to it."
    )


def _of_microbatches(findings: Findings, chosen: Numbers) -> str:
    place, layer = chosen["worst"]
    more = ""
    if len(chosen["moments"]) < chosen["recorded"]:
        more = f" {len(chosen['moments'])} of {chosen['recorded']} windows can be chosen."
    return (
        f"EP{findings.sizes[0]}, {label(findings.shown.case)}: one bar is one rank and one block "
        "one expert; a block's colour tells the expert's home, and hatched blocks are copies. The "
        f"first one shown, window {chosen['moments'][place]['step']} in layer "
        f"{chosen['layers'][layer]}, is the most uneven of all.{more}"
    )
