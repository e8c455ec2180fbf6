"""A load test on the terminal: what is told before, while and after it runs."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from ultraep.errors import UltraEPError
from ultraep.files.writing import write_text
from ultraep.tools.cli import render
from ultraep.tools.cli.lists import names_in
from ultraep.tools.cli.progress import Tell, duration, progress
from ultraep.tools.cli.terminal import Grid, complain

if TYPE_CHECKING:
    from ultraep.tools.serving.asked import EngineAsked, LoadAsked
    from ultraep.tools.serving.endpoint import EndpointsAsked
    from ultraep.tools.serving.measure import Turn

INTERRUPTED = 130  # exit code
SETTING_UP = 25.0  # seconds of starting and calibrating, roughly


class LoadTest:
    """One load test: what is told before, the turns that were measured, and where they go."""

    def __init__(
        self, console: Console, load: LoadAsked, json: Path | None, html: Path | None
    ) -> None:
        self.console, self.load, self.json, self.html = console, load, json, html
        self.turns: list[Turn] = []
        self.total = 0  # turns that are to come
        self.facts: list[tuple[str, str]] = []
        self.began = time.perf_counter()

    def measure_engine(self, model: str | None, options: dict[str, Any]) -> None:
        """By processes of this machine."""
        from ultraep.tools.serving.asked import EngineAsked
        from ultraep.tools.serving.run import check, run

        policy = options.pop("policy")
        given = {name: value for name, value in options.items() if value is not None}
        if policy is not None:
            given["variants"] = tuple(names_in(policy, "--policy"))
        asked = EngineAsked(load=self.load, model=model, **given)
        self._introduce_engine(asked, check(asked))
        self._measure(lambda tell: run(asked, lambda said: self._hear(said, tell)))

    def measure_servers(self, names: list[str], model: str | None, timeout: float | None) -> None:
        """By servers, wherever they are."""
        from ultraep.tools.serving.endpoint import EndpointsAsked, endpoint_of, run

        given = {} if timeout is None else {"timeout": timeout}
        servers = tuple(endpoint_of(name, model) for name in names)
        asked = EndpointsAsked(load=self.load, endpoints=servers, **given)
        self._introduce_servers(asked)
        self._measure(lambda tell: run(asked, lambda said: self._hear(said, tell)))

    # -- before ----------------------------------------------------------------------------------

    def _say(self, name: str, words: str) -> None:
        if name != "to do":
            self.facts.append((name.capitalize(), words))
        self.console.print(Text(f"{name:<9}{words}"), soft_wrap=True)

    def _introduce_engine(self, asked: EngineAsked, facts: Any) -> None:
        self._say(
            "model",
            f"{facts.name}: {facts.parameters / 1e6:.1f} million parameters, {facts.layers} layers "
            f"of {facts.experts} experts, {facts.top_k} for a token; {decimal(facts.nbytes)}",
        )
        self._say(
            "engine",
            f"{asked.ranks} rank{'s' * (asked.ranks > 1)} of this machine, one core and thread "
            f"each; {asked.slots} spare slots; routing: {asked.routing}; "
            f"{', '.join(asked.variants)}",
        )
        self._introduce_load()
        rates = len(asked.load.known_rates() or asked.load.shares)
        self.total = rates * len(asked.variants) * asked.load.rounds
        known = sum(map(asked.load.seconds_at, asked.load.known_rates()))
        each = known or rates * asked.load.seconds
        about = SETTING_UP + 1.2 * each * len(asked.variants) * asked.load.rounds
        self._say("to do", f"{self.total} turns, about {duration(about)} in all")

    def _introduce_servers(self, asked: EndpointsAsked) -> None:
        told = [f"{one.name} at {one.url}" for one in asked.endpoints]
        self._say("servers", f"{', '.join(told)}; {asked.timeout:g} s for an answer")
        self._introduce_load()
        rates = asked.load.known_rates()
        each = sum(asked.load.seconds_at(rate) for rate in rates)
        about = each * len(asked.endpoints) * asked.load.rounds
        self.total = len(rates) * len(asked.endpoints) * asked.load.rounds
        self._say("to do", f"{self.total} turns, at least {duration(about)} in all")

    def _introduce_load(self) -> None:
        load = self.load
        when = (
            f"{len(load.recorded)} recorded arrivals"
            if load.recorded
            else f"arrivals of a Poisson process, {load.seconds:g} s a turn"
        )
        lengths = f"{load.lengths.shortest} to {load.lengths.longest} tokens"
        self._say(
            "prompts",
            f"{lengths}, code, prose and tables in bursts of {load.lengths.burst}; {when}; "
            f"rounds: {load.rounds}; wanted within {load.objective:g} s",
        )

    def _calibrated(self, found: Any) -> None:
        rates = ", ".join(f"{rate:g}" for rate in found.rates)
        self._say(
            "found",
            f"{found.tokens_per_second:,.0f} tokens/s unbalanced; up to {found.budget} tokens of a "
            f"rank in a microbatch; a copy takes {1e3 * found.copy_seconds:.1f} ms and pays from "
            f"{found.min_tokens} rows on; prompts a second: {rates}",
        )

    # -- while it runs ---------------------------------------------------------------------------

    def _hear(self, said: Any, tell: Tell) -> None:
        from ultraep.tools.serving.measure import Turn

        if isinstance(said, Turn):
            self._heard(said, tell)
        else:
            self._calibrated(said)

    def _heard(self, turn: Turn, tell: Tell) -> None:
        self.turns.append(turn)
        known = sorted(waited for waited in turn.waited if waited is not None)
        median = f"{known[len(known) // 2]:.3f} s" if known else "no first token"
        words = f"round {turn.number + 1}, {turn.variant} at {turn.rate:g}/s: {median}"
        tell(len(self.turns), self.total, words)

    def _measure(self, work: Callable[[Tell], None]) -> None:
        """Do it; what was measured is shown and written, whatever ends it."""
        try:
            with progress("measuring") as tell:
                work(tell)
        except KeyboardInterrupt:
            self._conclude()
            complain("interrupted; the table shows the turns before")
            raise typer.Exit(INTERRUPTED) from None
        except UltraEPError:
            self._conclude()
            raise
        self._conclude()

    # -- afterwards ------------------------------------------------------------------------------

    def _conclude(self) -> None:
        from ultraep.tools.report.rows import as_json
        from ultraep.tools.serving.measure import under_load
        from ultraep.tools.serving.numbers import rows_of
        from ultraep.tools.serving.words import notes, verdict

        if not self.turns:
            return
        found = under_load(self.turns)
        self.console.print()
        self.console.print(_table(found, self.load.objective))
        self.console.print()
        for sentence in verdict(found):
            self.console.print(Text(sentence), width=min(self.console.width, 100))
        for note in notes(self.turns, found):
            self.console.print(Text(f"note: {note}", render.FAINT), soft_wrap=True)
        self.console.print(f"It took {time.perf_counter() - self.began:.0f} s in all.")
        if self.json is not None:
            command = shlex.join(["ultraep", *sys.argv[1:]])
            write_text(self.json, as_json(rows_of(found, self.load.objective, command)))
            self.console.print(f"numbers  {self.json}", soft_wrap=True)
        if self.html is not None:
            from ultraep.tools.serving.report import write_report

            write_report(self.html, self.turns, self.load.objective, self.facts)
            self.console.print(f"figure   {self.html}", soft_wrap=True)


def _table(found: Any, objective: float) -> Grid:
    from ultraep.tools.serving.measure import PERCENTILES, gains
    from ultraep.tools.serving.words import times

    heads = ("rate", "policy", "p50", "p90", "p99", "sooner", "served", f"in {objective:g} s")
    title = "Time to the first token in seconds; sooner: than the first policy, in the median"
    look: dict[str, Any] = {"box": box.SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
    grid = Grid(title=title, title_justify="left", pad_edge=False, **look)
    for head in (*heads, "imbalance", "lost"):
        grid.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
    last = None
    for one, gain in zip(found, gains(found), strict=True):
        if last not in (None, one.rate):
            grid.add_section()
        waits = (one.percentile(share) for share in PERCENTILES)
        grid.add_row(
            "" if one.rate == last else f"{one.rate:g}/s",
            one.variant,
            *("-" if wait is None else f"{wait:.3f}" for wait in waits),
            times(gain),
            f"{one.throughput:.2f}",
            f"{one.within(objective):.0%}",
            "-" if one.after is None else f"{one.before:.2f}->{one.after:.2f}",
            str(one.unanswered),
        )
        last = one.rate
    return grid
