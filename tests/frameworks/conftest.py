"""Tests against frameworks have a make target of their own; `make test` leaves them out."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    """Unless a path inside of this folder was asked for."""
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(HERE in path.parents for path in asked) else True
