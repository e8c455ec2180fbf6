"""All commands of `ultraep`, and how they report errors.

A user error prints one line on stderr and exits with code 2; any other exception is a bug and
leaves a traceback. The module of a command is imported when the command runs, which keeps `--help`
fast. torch and numba are imported by the functions that need them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ultraep import __version__
from ultraep.errors import UltraEPError
from ultraep_tools.cli.terminal import print_error
from ultraep_tools.imports import import_policies

# Typer comes with its own click or uses the installed one; this is the class of either.
UsageError: Any = typer.BadParameter.__base__

SUMMARIES = {
    "plan": "Plan the loads in a file: imbalance before and after, replicas, planning time.",
    "advise": "Recommend settings for a cluster before you rent it: does balancing pay there?",
    "trace": "Summarise, replan or convert a trace of a run; explain a crash or a hang.",
    "view": "Show traces in the browser: over time, layer by layer, down to one microbatch.",
    "demo": "Train a small MoE model, serve requests with it, and measure its layers.",
    "inspect": "Inspect a model: how imbalanced is its routing, and how much does balancing help?",
    "check": "Check whether balancing works on these machines, and what it gains.",
    "env": "Show versions, devices, frameworks and policies; runs nothing.",
}
EXITS = "Exit codes: 0 done; 2 wrong option, setting or file; 130 interrupted; 141 closed pipe."
EPILOG = (
    "New here? Start with: ultraep demo\n\n"
    "Exit codes: 0 done; 1 not ready (check) or plans differ (trace replay); 2 wrong "
    "option, setting or file; 130 interrupted; 141 closed pipe.\n\n"
    "Environment: ULTRAEP_TRACE=FOLDER records the runs of all balancers."
)


def load_command(name: str) -> Any:
    """Import the module of a command and return the command with all its options."""
    module, parent = importlib.import_module(f"ultraep_tools.cli.{name}"), typer.Typer()
    parent.callback()(lambda: None)  # makes the parent a group with one command
    if hasattr(module, "app"):
        parent.add_typer(module.app, name=name)
    else:
        parent.command(name, epilog=f"{module.EXAMPLE}\n\n{EXITS}")(module.command)
    group: Any = typer.main.get_command(parent)
    return without_flag_types(group.commands[name])


def without_flag_types(command: Any) -> Any:
    """Let the help show options without a value as `--json`, not as `--json <bool>`."""
    for parameter in command.get_params(command.context_class(command)):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for part in getattr(command, "commands", {}).values():
        without_flag_types(part)
    return command


class Commands(TyperGroup):
    """All commands; errors become one line and an exit code."""

    _summaries_suffice = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; for the help of the group, only its name and summary."""
        if self._summaries_suffice or cmd_name not in self.commands:
            return super().get_command(ctx, cmd_name)
        return load_command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._summaries_suffice = True
        without_flag_types(self)
        try:
            super().format_help(ctx, formatter)
        finally:
            self._summaries_suffice = False

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command line; print a usage error in one line instead of Typer's box."""
        if not extra.get("standalone_mode", True):
            return super().main(*args, **extra)
        try:
            code = super().main(*args, **extra | {"standalone_mode": False})
        except UsageError as error:
            if type(error).__name__ != "NoArgsIsHelpError":  # that one has printed the help
                message = error.format_message().strip().rstrip(".")
                where = error.ctx.command_path if error.ctx is not None else "ultraep"
                if message == "No such option: --import":
                    message += " here; it precedes the command: ultraep --import FILE COMMAND"
                print_error(f"{message[:1].lower()}{message[1:]} (see {where} --help)")
            code = 2
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        """Run a command; print a user error or an interruption in one line."""
        try:
            return super().invoke(ctx)
        except UltraEPError as error:
            print_error(error)
            raise typer.Exit(2) from None
        except MemoryError as error:
            print_error(f"out of memory: {error}".rstrip(": "))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print_error("interrupted")
            raise typer.Exit(130) from None


app = typer.Typer(
    name="ultraep",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=EPILOG,
)
for _name, _summary in SUMMARIES.items():
    app.command(_name, help=_summary)(lambda: None)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"ultraep {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[  # noqa: ARG001  its callback prints
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE",
            help="Import a Python file or module that registers policies; may be repeated.",
        ),
    ] = None,
) -> None:
    """Exact load balance for expert-parallel Mixture-of-Experts models."""
    if imports:
        import_policies(imports)
