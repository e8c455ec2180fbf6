"""The words of the report: facts of the run, tables, and one sentence for each plot.

Every figure comes from the result, or from the numbers that the page draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ultraep.tools.demo.report.sources import Sources
from ultraep.tools.demo.result import DemoResult, PolicyResult
from ultraep.tools.report.numbers import Numbers
from ultraep.tools.report.words import counted, listed, per_cent, size, table

Row = tuple[str, Callable[[PolicyResult], str]]
ROWS: tuple[Row, ...] = (
    ("imbalance without copies, mean", lambda p: f"{p.imbalance_before:.3f}"),
    ("imbalance without copies, worst", lambda p: f"{p.imbalance_before_worst:.3f}"),
    ("imbalance with copies, mean", lambda p: f"{p.imbalance_after:.3f}"),
    ("imbalance with copies, worst", lambda p: f"{p.imbalance_after_worst:.3f}"),
    ("best that any plan could do, mean", lambda p: f"{p.imbalance_bound:.3f}"),
    ("copies per layer and step", lambda p: f"{p.copies_per_layer:.2f}"),
    ("weights sent in training", lambda p: size(p.weights_bytes)),
    ("gradients sent in training", lambda p: size(p.gradients_bytes)),
    ("loss, last tenth of the steps", lambda p: f"{p.loss:.4f}"),
    ("loss on text that was held out", lambda p: f"{p.loss_held_out:.4f}"),
    ("training, tokens/s", lambda p: f"{p.tokens_per_second:,.0f}"),
    ("MoE layers alone, tokens/s", lambda p: f"{p.layer_tokens_per_second:,.0f}"),
    ("share of forced balance", lambda p: f"{100 * p.layer_share:.1f} %"),
    ("time to first token, median", lambda p: f"{1e3 * p.first_token_median:,.0f} ms"),
    ("time to first token, 90th percentile", lambda p: f"{1e3 * p.first_token_p90:,.0f} ms"),
    ("all requests", lambda p: f"{p.prefill_seconds:.2f} s"),
)


# -- facts and tables ----------------------------------------------------------------------------


def facts(sources: Sources) -> list[tuple[str, str]]:
    """The run in short."""
    result, sizes = sources.result, sources.result.sizes
    tokens = sizes.tokens * sizes.ranks
    return [
        ("Model", f"{result.parameters / 1e6:.1f} million parameters, {sizes.layers} MoE layers, "
                  f"{sizes.experts} experts in each, {sizes.top_k} of them for every token"),
        ("Ranks", f"{sizes.ranks}, each the home of {homes(sources)} experts of a layer, with "
                  f"{counted(sizes.slots, 'spare slot')} for copies"),
        ("Training", f"{counted(result.steps, 'step')} of {tokens:,} tokens, on "
                     f"{listed([domain.name for domain in sources.domains])}, "
                     f"under {listed([row.policy for row in result.policies])}"),
        ("Requests", f"{result.requests} with {result.request_tokens:,} tokens in all"),
        ("Machine", f"{result.machine}, {result.device}, Python {result.python}, "
                    f"ultraep {result.version}, seed {result.seed}"),
        ("Recorded", f"{sources.trace.header.created}; the whole run took "
                     f"{result.wall_seconds:.0f} s"),
    ]  # fmt: skip


def homes(sources: Sources) -> str:
    """Experts of a rank."""
    found = sources.trace.topology.homes_per_rank
    low, high = int(found.min()), int(found.max())
    return str(low) if low == high else f"{low} to {high}"


def notes(sources: Sources, numbers: dict[str, Numbers]) -> list[str]:
    """What a reader must know to judge the figures."""
    found = list(sources.result.notes)
    for policy, trace in sources.traces.items():
        if trace.dropped or trace.left_out:
            found.append(
                f"the trace of {policy} is not complete: {trace.dropped} records were dropped, "
                f"{trace.left_out} are not there of all ranks"
            )
    checks = sources.checks[sources.shown]
    if checks:
        found.append(
            f"{counted(checks, 'record')} of the check on held-out text, after the training, "
            "are in the trace but not in the plots"
        )
    return found + _thinned(sources, numbers)


def _thinned(sources: Sources, numbers: dict[str, Numbers]) -> list[str]:
    found, several = [], numbers["imbalance"]["steps_per_point"]
    if several > 1:
        found.append(
            f"a point of a line stands for {several} steps: their mean, and in the bands their "
            "least and largest value"
        )
    chosen = numbers["microbatches"]
    if len(chosen["moments"]) < chosen["recorded"]:
        found.append(
            f"{len(chosen['moments'])} of the {chosen['recorded']} microbatches can be chosen"
        )
    layers = numbers["replay"]["layers"]
    if len(layers) < len(sources.trace.layers):
        found.append(f"{len(layers)} of {len(sources.trace.layers)} layers were planned again")
    return found


def result_table(result: DemoResult) -> str:
    """All policies side by side."""
    rows = [[name, *(write(row) for row in result.policies)] for name, write in ROWS]
    return table(["", *(row.policy for row in result.policies)], rows, "result")


def replay_table(replayed: Numbers) -> str:
    """Means around the changes of domain."""
    span = counted(replayed["span"], "step")
    head = [
        "policy",
        "mean",
        f"{span} before a change",
        f"{span} after",
        "worst",
        "copies per layer",
    ]
    rows = [
        [
            policy_name(row),
            *(_ratio(row[key]) for key in ("mean", "before_shift", "after_shift", "worst")),
            f"{row['copies']:.2f}" + "*" * bool(row["beyond"]),
        ]
        for row in replayed["table"]
    ]
    return table(head, rows, "replay-table")


def policy_name(row: Numbers) -> str:
    """With the past that it places by."""
    window = row["window"]
    return row["policy"] if window is None else f"{row['policy']}, last {counted(window, 'step')}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


# -- a sentence for each plot --------------------------------------------------------------------


def sentences(sources: Sources, numbers: dict[str, Numbers]) -> dict[str, str]:
    """By section: what to see in it."""
    return {
        "imbalance": _of_imbalance(sources),
        "layers": _of_layers(numbers["layers"]),
        "microbatches": _of_microbatches(numbers["microbatches"]),
        "copies": _of_copies(sources, numbers["copies"]),
        "replay": _of_replay(numbers["replay"]),
        "loss": _of_loss(sources.result),
        "speed": _of_speed(sources.result),
        "requests": _of_requests(sources.result),
    }


def _of_imbalance(sources: Sources) -> str:
    trace = sources.trace
    before, after = trace.imbalance_before, trace.imbalance_after
    return (
        f"Without copies the fullest rank had {before.mean():.2f} times the load of the mean rank "
        f"({before.max():.2f} at worst); with the plans of {sources.shown} it had "
        f"{after.mean():.3f} times ({after.max():.3f} at worst)."
    )


def _of_layers(layers: Numbers) -> str:
    worst = max(range(len(layers["layer"])), key=lambda place: layers["before"][place])
    return (
        f"Layer {layers['layer'][worst]} was the most uneven one, {layers['before'][worst]:.2f} "
        f"without copies; with them {layers['after'][worst]:.3f}."
    )


def _of_microbatches(chosen: Numbers) -> str:
    place, layer = chosen["worst"]
    return (
        "One bar is one rank and one block one expert; a block's colour tells the expert's home, "
        "and hatched blocks are copies. Choose any microbatch; the first one shown, step "
        f"{chosen['moments'][place]['step']} in layer {chosen['layers'][layer]}, was the most "
        "uneven of all."
    )


def _of_copies(sources: Sources, copies: Numbers) -> str:
    made = float(sources.trace.num_copies.mean())
    steps = sources.result.steps
    return (
        f"{sources.shown} made {made:.2f} copies per layer on average, and moved "
        f"{size(copies['bytes_in_all'] / steps)} of weights and gradients per step, all ranks "
        f"together, {size(copies['bytes_in_all'])} in all."
    )


def _of_replay(replayed: Numbers) -> str:
    rows = {row["policy"]: row for row in replayed["table"]}
    old, new = rows["eplb"], rows["ultraep"]
    window, span = counted(replayed["window"], "step"), counted(replayed["span"], "step")
    if old["after_shift"] is None:
        return f"Over all steps eplb comes to {old['mean']:.3f}, ultraep to {new['mean']:.3f}."
    return (
        f"eplb places by the last {window}: in the first {span} after a change of domain it "
        f"stands at {old['after_shift']:.3f} (in the last {span} before it "
        f"{old['before_shift']:.3f}); ultraep plans by the loads of the step itself and stands at "
        f"{new['after_shift']:.3f} (before it {new['before_shift']:.3f})."
    )


def _of_loss(result: DemoResult) -> str:
    rows = result.policies
    if len(rows) == 1:
        return f"The loss ended at {rows[0].loss:.4f}."
    alike = _alike([row.losses for row in rows])
    later = ""
    if 0 < alike < result.steps:
        later = (
            " The later differences began in the last bit, as sums are taken in another order, "
            "and grow from step to step."
        )
    return (
        "Balancing changes only where a row is computed, so the lines should lie on each other: "
        f"they agree to one in a million over the first {counted(alike, 'step')}, at no step do "
        f"they differ by more than {per_cent(result.loss_difference)}, and over the last tenth of "
        f"the steps by {per_cent(result.loss_difference_last)}.{later}"
    )


def _alike(losses: Sequence[Sequence[float]]) -> int:
    """Steps until a loss differs from the first by more than one in a million.

    >>> _alike([[5.0, 4.0, 3.0], [5.0, 4.000001, 3.1]])
    2
    """
    for step, found in enumerate(zip(*losses, strict=True)):
        if not all(abs(loss - found[0]) <= 1e-6 * abs(found[0]) for loss in found):
            return step
    return len(losses[0])


def _of_speed(result: DemoResult) -> str:
    told = [f"{row.tokens_per_second:,.0f} under {row.policy}" for row in result.policies]
    return f"Tokens per second of all ranks together; the median step reached {listed(told)}."


def _of_requests(result: DemoResult) -> str:
    waited = [f"{1e3 * p.first_token_median:,.0f} ms under {p.policy}" for p in result.policies]
    shares = [f"{100 * p.layer_share:.0f} % under {p.policy}" for p in result.policies]
    return (
        f"Half of the requests had their first token after {listed(waited)}. The MoE layers alone "
        f"reached {listed(shares)} of the speed of forced balance, the dashed line: the same work "
        "with its rows dealt out evenly."
    )
