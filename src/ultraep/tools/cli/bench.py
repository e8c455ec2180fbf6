"""`ultraep bench prefill`: the time to the first token under load, policy by policy."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.text import Text

from ultraep.errors import ConfigError, UltraEPError
from ultraep.files.writing import check_targets, write_text
from ultraep.tools.cli import render
from ultraep.tools.cli.lists import names_in
from ultraep.tools.cli.options import Force, with_options
from ultraep.tools.cli.progress import Tell, duration, progress
from ultraep.tools.cli.tables import grid_of
from ultraep.tools.cli.terminal import complain, make_console

if TYPE_CHECKING:
    from ultraep.tools.serving.endpoint import EndpointOptions
    from ultraep.tools.serving.load import LoadOptions
    from ultraep.tools.serving.measure import Turn
    from ultraep.tools.serving.run import Calibrated, EngineOptions

EXAMPLE = (
    "Example: ultraep bench prefill --json prefill.json --html prefill.html\n\n"
    "Example: ultraep bench prefill --policy none,ultraep --routing even --load 0.5\n\n"
    "Example: ultraep bench prefill --endpoint plain=http://127.0.0.1:8000 "
    "--endpoint ultraep=http://127.0.0.1:8001 --rate 2,4,8 --seconds 30"
)
ENGINE_OPTIONS = ("policy", "ranks", "slots", "routing", "budget")
INTERRUPTED = 130  # exit code
SETTING_UP = 25.0  # seconds of starting and calibrating, roughly

app = typer.Typer(
    no_args_is_help=True,
    help="Measure how fast something is here.",
    epilog="Five minutes on two idle cores: ultraep bench prefill --html prefill.html",
)


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """Options of the command; None: not given."""

    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="A server of the OpenAI protocol instead of the engine here; several are "
            "compared: --endpoint A=URL --endpoint B=URL.",
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|NAME",
            help="Directory of a checkpoint; with --endpoint the model name of the servers.",
            show_default="a random model; the first that a server has",
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Policies to compare; gains are over the first. eplb: placed by the microbatch "
            "before, with fixed homes; even: none with forced even routing, a ceiling.",
            show_default="none,eplb,ultraep,even",
        ),
    ] = None
    ranks: Annotated[
        int | None, typer.Option(help="Processes of the engine.", show_default="2")
    ] = None
    slots: Annotated[
        int | None, typer.Option(help="Spare slots of every rank.", show_default="2")
    ] = None
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="own|even",
            help="Experts chosen by the model's router, or dealt out evenly.",
            show_default="own",
        ),
    ] = None
    budget: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Most tokens of a rank in a microbatch.",
            show_default="as many as take 0.5 s",
        ),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(metavar="X,...", help="Prompts a second.", show_default="by --load"),
    ] = None
    load: Annotated[
        str | None,
        typer.Option(
            metavar="X,...",
            help="Rates as shares of what the engine serves unbalanced.",
            show_default="0.4,0.8,1.1,1.4",
        ),
    ] = None
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded arrivals: lines of seconds[,tokens]; --rate stretches them.",
            show_default="a Poisson process",
        ),
    ] = None
    seconds: Annotated[float, typer.Option(help="Seconds of arrivals in every turn.")] = 5.0
    rounds: Annotated[int, typer.Option(help="Turns of every policy at every rate.")] = 3
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt.")] = 16
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 256
    burst: Annotated[int, typer.Option(help="Prompts until the subject changes.")] = 12
    slo: Annotated[
        float, typer.Option(metavar="SECONDS", help="Objective for the time to the first token.")
    ] = 1.0
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for a server's answer.", show_default="30"),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of weights, arrivals and prompts.")] = 0
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all numbers as JSON.")
    ] = None
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as a page.")
    ] = None

    def load_options(self) -> LoadOptions:
        """The load, checked."""
        from ultraep.tools.serving.load import Lengths, LoadOptions, read_arrivals

        if self.load is not None and (self.rate is not None or self.arrivals is not None):
            raise ConfigError(
                "give --rate, --load or --arrivals alone; --rate goes with --arrivals"
            )
        shares = {} if self.load is None else {"shares": numbers_of(self.load, "--load")}
        return LoadOptions(
            rates=() if self.rate is None else numbers_of(self.rate, "--rate"),
            seconds=self.seconds,
            rounds=self.rounds,
            lengths=Lengths(shortest=self.shortest, longest=self.longest, burst=self.burst),
            recorded=() if self.arrivals is None else read_arrivals(self.arrivals),
            objective=self.slo,
            seed=self.seed,
            **shares,
        )

    def engine_options(self) -> EngineOptions:
        """The engine, checked; options of servers are refused."""
        from ultraep.tools.serving.run import EngineOptions

        self.refuse(("timeout",), "of servers: only with --endpoint")
        options = {name: getattr(self, name) for name in ENGINE_OPTIONS}
        options = {name: value for name, value in options.items() if value is not None}
        if self.policy is not None:
            options["variants"] = tuple(names_in(options.pop("policy"), "--policy"))
        return EngineOptions(load=self.load_options(), model=self.model, **options)

    def endpoint_options(self) -> EndpointOptions:
        """The servers, checked; options of the engine are refused."""
        from ultraep.tools.serving.endpoint import EndpointOptions, endpoint_of

        self.refuse((*ENGINE_OPTIONS, "load"), "of the engine: not with --endpoint")
        timeout = {} if self.timeout is None else {"timeout": self.timeout}
        servers = tuple(endpoint_of(name, self.model) for name in self.endpoint or ())
        return EndpointOptions(load=self.load_options(), endpoints=servers, **timeout)

    def refuse(self, names: tuple[str, ...], why: str) -> None:
        """Refuse options that do not apply, instead of ignoring them."""
        given = [f"--{name}" for name in names if getattr(self, name) is not None]
        if given:
            raise ConfigError(f"{', '.join(given)}: {why}")


def numbers_of(text: str, option: str) -> tuple[float, ...]:
    """Numbers with commas between them.

    >>> numbers_of("0.5, 2", "--rate")
    (0.5, 2.0)
    """
    try:
        return tuple(float(number) for number in names_in(text, option))
    except ValueError:
        raise ConfigError(f"{option} must be numbers like 0.5,2, got {text!r}") from None


@app.command("prefill", epilog=EXAMPLE)
@with_options(PrefillOptions)
def prefill(options: PrefillOptions, force: Force = False) -> None:
    """Measure the time to the first token while prompts arrive, for every policy and rate.

    Prompts of mixed subjects and lengths arrive in real time, whether or not those before are
    answered. All policies get the same ones, in turns. Without --endpoint, processes of this
    machine serve a Mixture-of-Experts model of transformers.
    """
    check_targets((options.json, "benchmark"), (options.html, "page"), force=force)
    test = LoadTest(options)
    if options.endpoint:
        from ultraep.tools.serving import endpoint

        servers = options.endpoint_options()
        test.introduce_servers(servers)
        test.measure(lambda report: endpoint.run(servers, report))
    else:
        from ultraep.tools.serving import run

        engine = options.engine_options()
        test.introduce_engine(engine, run.check(engine))
        test.measure(lambda report: run.run(engine, report))


class LoadTest:
    """One load test on the terminal: its introduction, its turns, its results."""

    def __init__(self, options: PrefillOptions) -> None:
        self.options, self.console, self.began = options, make_console(), time.perf_counter()
        self.turns: list[Turn] = []
        self.total = 0  # turns in all
        self.facts: list[tuple[str, str]] = []

    def introduce_engine(self, engine: EngineOptions, facts: Any) -> None:
        """Print what will be measured by processes of this machine."""
        self._say(
            "model",
            f"{facts.name}: {facts.parameters / 1e6:.1f} million parameters, {facts.layers} layers "
            f"of {facts.experts} experts, {facts.top_k} per token; {decimal(facts.nbytes)}",
        )
        self._say(
            "engine",
            f"{engine.ranks} rank{'s' * (engine.ranks > 1)} of this machine, one core and thread "
            f"each; {engine.slots} spare slots; routing: {engine.routing}; "
            f"{', '.join(engine.variants)}",
        )
        load = engine.load
        rates = len(load.known_rates() or load.shares)
        each = sum(map(load.seconds_at, load.known_rates())) or rates * load.seconds
        about = SETTING_UP + 1.2 * each * len(engine.variants) * load.rounds
        self._introduce_load(
            load, rates * len(engine.variants), f"about {duration(about)} on idle cores"
        )

    def introduce_servers(self, servers: EndpointOptions) -> None:
        """Print what will be measured by servers."""
        names = [f"{server.name} at {server.url}" for server in servers.endpoints]
        self._say("servers", f"{', '.join(names)}; {servers.timeout:g} s for an answer")
        rates, count = servers.load.known_rates(), len(servers.endpoints)
        least = sum(map(servers.load.seconds_at, rates)) * count * servers.load.rounds
        self._introduce_load(servers.load, len(rates) * count, f"at least {duration(least)}")

    def _introduce_load(self, load: LoadOptions, turns: int, how_long: str) -> None:
        lengths, arrivals = load.lengths, f"{len(load.recorded)} recorded arrivals"
        if not load.recorded:
            arrivals = f"arrivals of a Poisson process, {load.seconds:g} s a turn"
        self._say(
            "prompts",
            f"{lengths.shortest} to {lengths.longest} tokens, code, prose and tables in bursts of "
            f"{lengths.burst}; {arrivals}; objective {load.objective:g} s; rounds: {load.rounds}",
        )
        self.total = turns * load.rounds
        self.console.print(f"{'to do':<9}{self.total} turns, {how_long}", soft_wrap=True)

    def _say(self, name: str, words: str) -> None:
        self.facts.append((name.capitalize(), words))
        self.console.print(Text(f"{name:<9}{words}"), soft_wrap=True)

    def measure(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        """Do the work; what was measured is printed and written, whatever ends it."""
        try:
            with progress("measuring") as tell:
                work(lambda event: self._add(event, tell))
        except KeyboardInterrupt:
            self._conclude()
            complain("interrupted; the table shows the turns before")
            raise typer.Exit(INTERRUPTED) from None
        except UltraEPError:
            self._conclude()
            raise
        self._conclude()

    def _add(self, event: Turn | Calibrated, tell: Tell) -> None:
        from ultraep.tools.serving.measure import Turn

        if not isinstance(event, Turn):
            self._say(
                "speed",
                f"{event.tokens_per_second:,.0f} tokens/s unbalanced; up to {event.budget} tokens "
                f"of a rank in a microbatch; a copy takes {1e3 * event.copy_seconds:.1f} ms and "
                f"pays from {event.min_tokens} rows on; prompts a second: "
                + ", ".join(f"{rate:g}" for rate in event.rates),
            )
            return
        self.turns.append(event)
        known = sorted(waited for waited in event.waited if waited is not None)
        median = f"{known[len(known) // 2]:.3f} s" if known else "no first token"
        words = f"round {event.number + 1}, {event.variant} at {event.rate:g}/s: {median}"
        tell(len(self.turns), self.total, words)

    def _conclude(self) -> None:
        from ultraep.tools.report.rows import as_json
        from ultraep.tools.serving.measure import under_load
        from ultraep.tools.serving.report import headline, notes, rows_of, table

        if not self.turns:
            return
        loads, options, console = under_load(self.turns), self.options, self.console
        title = "Seconds to the first token; sooner: than the first policy, in the median"
        console.print()
        console.print(grid_of(title, *table(loads, options.slo)))
        console.print(f"\n{headline(loads)}.", soft_wrap=True)
        for note in notes(self.turns):
            console.print(Text(f"note: {note}", render.FAINT), soft_wrap=True)
        console.print(f"It took {time.perf_counter() - self.began:.0f} s in all.")
        if options.json is not None:
            command = shlex.join(["ultraep", *sys.argv[1:]])
            write_text(options.json, as_json(rows_of(loads, options.slo, command)))
            console.print(f"numbers  {options.json}", soft_wrap=True)
        if options.html is not None:
            from ultraep.tools.serving.report import write_report

            write_report(options.html, self.turns, options.slo, self.facts)
            console.print(f"figure   {options.html}", soft_wrap=True)
