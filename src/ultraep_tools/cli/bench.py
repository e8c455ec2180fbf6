"""`ultraep bench prefill`: the time to first token under load, policy by policy."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ultraep.files.writing import write_text
from ultraep_tools.cli import options as cli
from ultraep_tools.cli.options import option, refuse_options, set_options
from ultraep_tools.cli.terminal import Terminal, progress
from ultraep_tools.outputs import check_targets
from ultraep_tools.report.words import counted

if TYPE_CHECKING:
    from ultraep_tools.serving.endpoint import EndpointOptions
    from ultraep_tools.serving.load import LoadOptions
    from ultraep_tools.serving.measure import Turn
    from ultraep_tools.serving.run import Calibrated, EngineOptions

EXAMPLE = (
    "Example: ultraep bench prefill --json prefill.json --html prefill.html\n\n"
    "Example: ultraep bench prefill --policy none,ultraep --routing even --load 0.5\n\n"
    "Example: ultraep bench prefill --endpoint plain=http://127.0.0.1:8000 "
    "--endpoint ultraep=http://127.0.0.1:8001 --rate 2,4,8 --seconds 30"
)
ENGINE_OPTIONS = ("policy", "ranks", "device", "slots", "routing", "budget")

app = typer.Typer(
    no_args_is_help=True,
    help="Measure speed on this machine.",
    epilog="Five minutes on two idle cores: ultraep bench prefill --html prefill.html",
)


class PrefillOptions(cli.Options):
    """Options of the command; None means not set."""

    endpoint: list[str] | None = option(
        "Measure a server with the OpenAI protocol instead of the built-in engine. Repeat the "
        "option to compare servers.",
        metavar="[NAME=]URL",
    )
    model: str | None = option(
        "Directory of a checkpoint; with --endpoint, the servers' model name.",
        "a random model; the first model of a server",
        metavar="DIR|NAME",
    )
    policy: str | None = option(
        "Policies to compare with the first one. even forces even routing, an upper bound.",
        "none,ultraep,even",
        metavar="NAME,...",
    )
    ranks: int | None = option("Ranks of the engine, one process each.", "2")
    device: str | None = option(
        "Device of the ranks. Ranks share GPUs if there are fewer GPUs than ranks.",
        "cpu",
        metavar="cpu|cuda",
    )
    slots: int | None = option("Spare slots per rank.", "2")
    routing: str | None = option(
        "Use the model's router, or assign experts evenly.", "own", metavar="own|even"
    )
    budget: int | None = option("Maximum tokens per rank and microbatch.", "calibrated to 0.5 s")
    rate: str | None = option("Prompts per second.", "set by --load", metavar="X,...")
    load: str | None = option(
        "Rates as fractions of the unbalanced engine's throughput.",
        "0.4,0.8,1.1,1.4",
        metavar="X,...",
    )
    arrivals: Path | None = option(
        "Recorded arrivals: lines of seconds[,tokens]; --rate rescales their times.",
        "a Poisson process",
        metavar="FILE",
    )
    seconds: float = option("Seconds of arrivals per run.", default=5.0)
    rounds: int = option("Repetitions per policy and rate; policies alternate.", default=3)
    shortest: int = option("Tokens of the shortest prompt.", default=16)
    longest: int = option("Tokens of the longest prompt.", default=256)
    burst: int = option("Consecutive prompts with the same subject.", default=12)
    slo: float = option("Target time to first token, in seconds.", default=1.0)
    timeout: float | None = option("Seconds to wait for a server.", "30")
    seed: int = option("Seed of weights, arrivals and prompts.", default=0)
    json: Path | None = option("Write all numbers as JSON.", metavar="FILE")
    html: Path | None = option("Write a report.", metavar="FILE")
    force: bool = cli.force_option()

    def load_options(self) -> LoadOptions:
        from ultraep_tools.serving.load import Lengths, LoadOptions, read_arrivals

        shares = {}
        if self.load is not None:
            refuse_options(self, ("rate", "arrivals"), "--load sets the rates")
            shares = {"shares": cli.split_numbers(self.load, "--load", float)}
        return LoadOptions(
            rates=() if self.rate is None else cli.split_numbers(self.rate, "--rate", float),
            seconds=self.seconds,
            rounds=self.rounds,
            lengths=Lengths(shortest=self.shortest, longest=self.longest, burst=self.burst),
            recorded=() if self.arrivals is None else read_arrivals(self.arrivals),
            objective=self.slo,
            seed=self.seed,
            **shares,
        )

    def engine_options(self) -> EngineOptions:
        from ultraep_tools.serving.run import EngineOptions

        refuse_options(self, ("timeout",), "the built-in engine has no timeout")
        options = set_options(self, ENGINE_OPTIONS)
        if self.policy is not None:
            options["variants"] = cli.split_names(options.pop("policy"), "--policy")
        return EngineOptions(load=self.load_options(), model=self.model, **options)

    def endpoint_options(self) -> EndpointOptions:
        from ultraep_tools.serving.endpoint import EndpointOptions, endpoint_of

        refuse_options(self, (*ENGINE_OPTIONS, "load"), "--endpoint replaces the built-in engine")
        timeout = {} if self.timeout is None else {"timeout": self.timeout}
        servers = tuple(endpoint_of(name, self.model) for name in self.endpoint or ())
        return EndpointOptions(load=self.load_options(), endpoints=servers, **timeout)


@app.command("prefill", epilog=EXAMPLE)
@cli.with_options
def prefill(options: PrefillOptions) -> None:
    """Measure the time to first token while prompts arrive, for every policy and rate.

    Prompts of mixed subjects and lengths arrive in real time, whether or not earlier ones are
    answered. The policies take turns and get the same prompts. Without --endpoint, processes on
    this machine serve a Mixture-of-Experts model of transformers.
    """
    check_targets((options.json, "benchmark"), (options.html, "page"), force=options.force)
    test = LoadTest(options)
    if options.endpoint:
        from ultraep_tools.serving import endpoint

        servers = options.endpoint_options()
        names = [f"{server.name} at {server.url}" for server in servers.endpoints]
        facts = {"servers": f"{', '.join(names)}; timeout {servers.timeout:g} s"}
        test.introduce(facts, servers.load, len(names))
        test.measure(lambda report: endpoint.run(servers, report))
    else:
        from ultraep_tools.serving import run

        engine = options.engine_options()
        model = run.check(engine)
        places = "one core and thread each" if engine.device == "cpu" else "on GPUs"
        facts = {
            "model": f"{model.name}: {model.parameters / 1e6:.1f} million parameters, "
            f"{model.layers} layers of {model.experts} experts, {model.top_k} per token",
            "engine": f"{counted(engine.ranks, 'rank')}, {places}; "
            f"{counted(engine.slots, 'spare slot')}; routing: {engine.routing}; "
            f"policies {', '.join(engine.variants)}; calibrated before the first run",
        }
        test.introduce(facts, engine.load, len(engine.variants))
        test.measure(lambda report: run.run(engine, report))


class LoadTest:
    """The terminal output of a load test: introduction, progress, results."""

    def __init__(self, options: PrefillOptions) -> None:
        self.options, self.terminal, self.began = options, Terminal(), time.perf_counter()
        self.turns: list[Turn] = []
        self.total, self.device = 0, ""
        self.facts: dict[str, str] = {}

    def introduce(self, facts: dict[str, str], load: LoadOptions, variants: int) -> None:
        """Print the setup and the amount of work."""
        lengths, rates = load.lengths, load.known_rates()
        arrivals = f"Poisson arrivals, {load.seconds:g} s per run"
        if load.recorded:
            arrivals = f"{len(load.recorded)} recorded arrivals"
        self.facts = facts | {
            "prompts": f"{lengths.shortest} to {lengths.longest} tokens, code, prose and tables in "
            f"bursts of {lengths.burst}; {arrivals}; target {load.objective:g} s; "
            f"{counted(load.rounds, 'round')}",
        }
        seconds = sum(map(load.seconds_at, rates)) or len(load.shares) * load.seconds
        self.total = (len(rates) or len(load.shares)) * variants * load.rounds
        arrivals = f"{variants * load.rounds * seconds:.0f} s of arrivals in total"
        self.terminal.print_facts(**self.facts, work=f"{counted(self.total, 'run')}, {arrivals}")

    def measure(self, work: Callable[[Callable[[Any], None]], None]) -> None:
        """Run the test; print and write the finished runs even if it is interrupted or fails."""
        try:
            with progress("measuring") as report:
                work(lambda event: self._add(event, report))
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the table shows the finished runs") from None
        finally:
            self._conclude()

    def _add(self, event: Turn | Calibrated, report: Callable[..., None]) -> None:
        from ultraep_tools.serving.measure import Turn

        if isinstance(event, Turn):
            self.turns.append(event)
            times = sorted(waited for waited in event.waited if waited is not None)
            median = f"{times[len(times) // 2]:.3f} s" if times else "no first token"
            text = f"round {event.number + 1}, {event.variant} at {event.rate:g}/s: {median}"
            report(len(self.turns), self.total, text)
            return
        rates, self.device = ", ".join(f"{rate:g}" for rate in event.rates), event.device
        self.facts["speed"] = (
            f"{event.tokens_per_second:,.0f} tokens/s unbalanced on {event.device}; at most "
            f"{event.budget} tokens per rank and microbatch; prompts per second: {rates}"
        )
        self.terminal.print_facts(speed=self.facts["speed"])

    def _conclude(self) -> None:
        from ultraep_tools.report.rows import as_json, cpu_device
        from ultraep_tools.serving.measure import headline, notes, page, rows_of, table, under_load

        if not self.turns:
            return
        loads, options, terminal = under_load(self.turns), self.options, self.terminal
        title = "Seconds to first token; sooner: gain of the median over the first policy"
        terminal.print()
        terminal.print_table(*table(loads, options.slo), title)
        terminal.print(f"\n{headline(loads)}.", soft_wrap=True)
        terminal.print_notes(*notes(self.turns))
        terminal.print(f"Measured in {time.perf_counter() - self.began:.0f} s.")
        if options.json is not None:
            command = shlex.join(["ultraep", *sys.argv[1:]])
            rows = rows_of(loads, options.slo, command, self.device or cpu_device())
            write_text(options.json, as_json(rows))
            terminal.print_facts(numbers=options.json)
        if options.html is not None:
            facts = [(name.capitalize(), text) for name, text in self.facts.items()]
            write_text(options.html, page(self.turns, options.slo, facts).html())
            terminal.print_facts(report=options.html)
