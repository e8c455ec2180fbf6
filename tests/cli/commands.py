"""Run commands of `ultraep`, in this process or in another one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

import ultraep
from ultraep_tools.cli.commands import app

SOURCE = Path(ultraep.__file__).parent.parent


def invoke(*words, width=100):
    """Run a command in this process, without a terminal."""
    environment = {"COLUMNS": str(width), "FORCE_COLOR": None, "TERM": "dumb"}
    return CliRunner().invoke(app, [str(word) for word in words], env=environment)


def output(*words, width=100):
    result = invoke(*words, width=width)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def flat(*words, width=100):
    """Return what a successful command prints, with single spaces."""
    return " ".join(output(*words, width=width).split())


def records(*words):
    """Return the JSON of a successful command; stderr must be empty."""
    result = invoke(*words, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def assert_one_line(result, message):
    """A user error: exit code 2, nothing on stdout, one line on stderr."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("ultraep: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert message.lower() in result.stderr.lower(), result.stderr


def start(*words, program=("-m", "ultraep"), **options):
    return subprocess.Popen(
        [sys.executable, *map(str, (*program, *words))],
        env=os.environ | {"PYTHONPATH": str(SOURCE)} | options.pop("environment", {}),
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def shell(*words, program=("-m", "ultraep"), **environment):
    process = start(*words, program=program, environment=environment, stdout=subprocess.PIPE)
    out, errors = process.communicate(timeout=300)
    return process.returncode, out, errors
