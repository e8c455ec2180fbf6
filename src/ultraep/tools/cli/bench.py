"""`ultraep bench prefill`: the time to the first token under load, policy by policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ultraep.errors import ConfigError
from ultraep.files.writing import check_targets
from ultraep.tools.cli.lists import names_in
from ultraep.tools.cli.load_test import LoadTest
from ultraep.tools.cli.options import Force
from ultraep.tools.cli.terminal import make_console

EXAMPLE = (
    "Example: ultraep bench prefill --json prefill.json --html prefill.html\n\n"
    "Example: ultraep bench prefill --policy none,ultraep --routing even --load 0.5\n\n"
    "Example: ultraep bench prefill --endpoint plain=http://127.0.0.1:8000 "
    "--endpoint ultraep=http://127.0.0.1:8001 --rate 2,4,8 --seconds 30"
)
ENGINE, SERVERS = "of the engine: not with --endpoint", "of servers: only with --endpoint"

app = typer.Typer(
    no_args_is_help=True,
    help="Measure how fast something is here.",
    epilog="Five minutes on two idle cores: ultraep bench prefill --html prefill.html",
)


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
def prefill(
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]URL",
            help="A server of the OpenAI protocol instead of the engine here; several are "
            "compared: --endpoint A=URL --endpoint B=URL.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|NAME",
            help="Folder of a checkpoint; with --endpoint the name that servers know it by.",
            show_default="a random model; the first that a server has",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="What is compared; gains are over the first. eplb: placed by the microbatch "
            "before, with fixed homes; even: none with forced even routing, a ceiling.",
            show_default="none,eplb,ultraep,even",
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes of the engine.", show_default="2")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(help="Spare slots of every rank.", show_default="2")
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(metavar="own|even", help="Who chooses experts.", show_default="own"),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Most tokens of a rank in a microbatch.",
            show_default="what takes 0.5 s",
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="X,...", help="Prompts a second.", show_default="by --load"),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="X,...",
            help="Rates as shares of what the engine serves unbalanced.",
            show_default="0.4,0.8,1.1,1.4",
        ),
    ] = None,
    arrivals: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded arrivals: lines of seconds[,tokens]; --rate stretches them.",
            show_default="a Poisson process",
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of arrivals at every rate and round.")] = 5.0,
    rounds: Annotated[int, typer.Option(help="Turns of every policy at every rate.")] = 3,
    shortest: Annotated[int, typer.Option(help="Tokens of the shortest prompt.")] = 16,
    longest: Annotated[int, typer.Option(help="Tokens of the longest prompt.")] = 256,
    burst: Annotated[int, typer.Option(help="Prompts until the subject changes.")] = 12,
    slo: Annotated[
        float, typer.Option(metavar="SECONDS", help="In which a first token is wanted.")
    ] = 1.0,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for a server's answer.", show_default="30"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, arrivals and prompts.")] = 0,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all numbers as JSON.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the figure as a page.")
    ] = None,
    force: Force = False,
) -> None:
    """Measure the time to the first token while prompts arrive, for every policy and rate.

    Prompts of mixed subjects and lengths arrive in real time, whether or not those before are
    answered. All policies get the same ones, in turns. Without --endpoint, processes of this
    machine serve a Mixture-of-Experts model of transformers.
    """
    from ultraep.tools.serving.arrivals import read_arrivals
    from ultraep.tools.serving.asked import LoadAsked
    from ultraep.tools.serving.prompts import Lengths

    check_targets((json, "benchmark"), (html, "page"), force=force)
    given = {} if load is None else {"shares": numbers_of(load, "--load")}
    if load is not None and (rate is not None or arrivals is not None):
        raise ConfigError("give --rate, --load or --arrivals alone; --rate goes with --arrivals")
    asked = LoadAsked(
        rates=() if rate is None else numbers_of(rate, "--rate"),
        seconds=seconds,
        rounds=rounds,
        lengths=Lengths(shortest=shortest, longest=longest, burst=burst),
        recorded=() if arrivals is None else read_arrivals(arrivals),
        objective=slo,
        seed=seed,
        **given,
    )
    engine = {"policy": policy, "ranks": ranks, "slots": slots, "routing": routing}
    engine |= {"budget": budget, "load": load} if endpoint else {"budget": budget}
    test = LoadTest(make_console(), asked, json, html)
    if endpoint:
        _refuse(engine, ENGINE)
        test.measure_servers(endpoint, model, timeout)
    else:
        _refuse({"timeout": timeout}, SERVERS)
        test.measure_engine(model, engine)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise ConfigError(f"{', '.join(given)}: {why}")
