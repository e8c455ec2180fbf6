"""`ultraep inspect`: the imbalance of a model's routing, and the effect of balancing."""

from __future__ import annotations

import shlex
import time
import warnings
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from ultraep.supported import TRANSFORMERS
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.terminal import Terminal, progress
from ultraep_tools.inspect.options import InspectOptions
from ultraep_tools.report.page import RESULT_FILE

if TYPE_CHECKING:
    from ultraep_tools.inspect.findings import Findings
    from ultraep_tools.inspect.run import Inspection

EXAMPLE = (
    "Example: ultraep inspect --random qwen3_moe\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --text code.txt --text prose.txt --ep 8,64\n\n"
    "Example: ultraep inspect models/Qwen3-30B-A3B --layers 0-7 --tokens 4096"
)
PRINTED_LAYERS = 12  # result.json has all layers


@cli.with_options
def command(options: InspectOptions) -> None:
    """Inspect a model: how imbalanced is its routing, and how much does balancing help?

    Sends text through a Mixture-of-Experts checkpoint of transformers on this machine, records the
    choices of its routers, and plans them for large groups. Downloads nothing and needs no cluster.
    """
    TRANSFORMERS.check()
    Terminal(stderr=True).print(f"loading torch and transformers for {options.name}")
    from ultraep_tools.inspect.run import Inspection, prepare_outputs

    terminal = Terminal()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch falls back
        inspection = Inspection(options)
        prepare_outputs(options.out)
        _introduce(terminal, inspection)
        began = time.perf_counter()
        with progress("reading") as report:
            inspection.record(report)
        with progress("planning") as report:
            findings = inspection.findings(report)
        result = inspection.result(findings, time.perf_counter() - began)
        _show(terminal, result, findings)
        inspection.save(result)  # after printing: a full disk loses no output
    _show_files(terminal, inspection)


def _introduce(terminal: Terminal, inspection: Inspection) -> None:
    """Print sizes before anything is read."""
    model, spans = inspection.model, inspection.texts
    layers = f"{len(inspection.layers)} of {model.layers} layers"
    tokens = sum(span.tokens for span in spans)
    length = inspection.windows[0].shape[1]
    terminal.print_facts(
        model=f"{inspection.options.name}: {decimal(model.nbytes)}, {layers}, "
        f"{inspection.experts} experts in each "
        f"({model.device}, {str(model.dtype).removeprefix('torch.')})",
        text=f"{', '.join(span.name for span in spans)}: {tokens:,} tokens in "
        f"{len(inspection.windows)} windows, sequences of {length}",
    )


def _show(terminal: Terminal, result: dict[str, Any], findings: Findings) -> None:
    """Print the answer, then the tables."""
    from ultraep_tools.inspect.findings import LEGEND, change_table

    terminal.print(f"\n{findings.headline}\n", style="bold", soft_wrap=True)
    title = "Imbalance by number of ranks, mean of all layers and windows (worst)"
    terminal.print_table(*findings.table(), title)
    terminal.print_faint(LEGEND)
    which = "by layer" if len(findings.layers) <= PRINTED_LAYERS else "of the most uneven layers"
    terminal.print()
    layers = change_table(findings.by_layer, PRINTED_LAYERS)
    terminal.print_table(*layers, f"Imbalance {which}, before -> after")
    terminal.print()
    terminal.print_table(*change_table(findings.by_text), "Imbalance by text, before -> after")
    terminal.print()
    terminal.print_notes(*result["notes"])
    terminal.print(f"Measured in {result['wall_seconds']:.0f} s.\n")


def _show_files(terminal: Terminal, inspection: Inspection) -> None:
    """Print what was written, and the commands that use it."""
    from ultraep_tools.inspect.run import TRACE

    out = inspection.options.out
    terminal.print_facts(trace=out / TRACE, result=out / RESULT_FILE)
    view = shlex.join(["ultraep", "view", str(out / TRACE)])
    terminal.print(f"\nLook at it: {view}", soft_wrap=True)
