"""Refuse versions of Python and torch that are too old, in one line. Imported before all else."""

import sys

from ultraep.errors import BackendUnavailable

PYTHON, TORCH = (3, 11), (2, 11)  # as in pyproject.toml

if sys.version_info < PYTHON:
    raise BackendUnavailable(
        "ultraep needs Python 3.11 or newer, this is Python {}.{}.{}: create the environment with "
        "a newer Python".format(*sys.version_info[:3])
    )


def check_torch() -> None:
    """Refuse a torch that is too old."""
    import torch

    installed = str(torch.__version__)
    if tuple(map(int, installed.split(".")[:2])) < TORCH:
        raise BackendUnavailable(
            f"ultraep needs torch 2.11 or newer, torch {installed} is installed: "
            "pip install 'torch>=2.11'"
        )
