"""All commands of `ultraep`, and how they report errors.

A user error is one line on stderr and exit code 2; anything else is a bug and leaves a traceback.
torch and numba are imported by the commands that need them, not here: `--help` is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ultraep.cli.advise as advise
import ultraep.cli.bench as bench
import ultraep.cli.demo as demo
import ultraep.cli.env as env
import ultraep.cli.inspect as inspect
import ultraep.cli.plan as plan
import ultraep.cli.simulate as simulate
import ultraep.cli.trace as trace
import ultraep.cli.view as view
from ultraep.cli.terminal import complain
from ultraep.errors import UltraEPError
from ultraep.version import __version__

# Typer comes with its own click or uses the installed one; this is the class of either.
UsageError: Any = typer.BadParameter.__base__


class Commands(TyperGroup):
    """All commands, with errors turned into one line and an exit code."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; a wrong one is one line instead of Typer's box."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **extra | {"standalone_mode": False})
        except UsageError as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # that one has printed the help
                complain(_in_one_line(error))
            code = 2
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UltraEPError as error:
            complain(error)
            raise typer.Exit(2) from None
        except MemoryError as error:
            complain(f"out of memory: {error}".rstrip(": "))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            complain("interrupted")
            raise typer.Exit(130) from None


def _in_one_line(error: Any) -> str:
    message = error.format_message().strip().rstrip(".")
    where = error.ctx.command_path if error.ctx is not None else "ultraep"
    return f"{message[:1].lower()}{message[1:]} (see {where} --help)"


EPILOG = (
    "New here? Start with: ultraep demo\n\n"
    "Exit codes: 0, done; 1, a check failed (trace replay); 2, a wrong option, setting or file, "
    "with one line on stderr; 130, interrupted; 141, the reader of a pipe closed it.\n\n"
    "Environment: ULTRAEP_TRACE=FOLDER records the runs of all balancers."
)
app = typer.Typer(
    name="ultraep",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
)

EXITS = "Exit codes: 0, done; 2, wrong option, setting or file; 130, interrupted; 141, closed pipe."
app.command("plan", epilog=f"{plan.EXAMPLE}\n\n{EXITS}")(plan.command)
app.command("simulate", epilog=f"{simulate.EXAMPLE}\n\n{EXITS}")(simulate.command)
app.command("advise", epilog=f"{advise.EXAMPLE}\n\n{EXITS}")(advise.command)
app.add_typer(trace.app, name="trace")
app.command("view", epilog=f"{view.EXAMPLE}\n\n{EXITS}")(view.command)
app.command("demo", epilog=f"{demo.EXAMPLE}\n\n{EXITS}")(demo.command)
app.command("inspect", epilog=f"{inspect.EXAMPLE}\n\n{EXITS}")(inspect.command)
app.add_typer(bench.app, name="bench")
app.command("env", epilog=f"{env.EXAMPLE}\n\n{EXITS}")(env.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ultraep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Exact load balance for expert-parallel Mixture-of-Experts models."""
