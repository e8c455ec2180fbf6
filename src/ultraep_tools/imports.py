"""`ultraep --import`: Python files and modules that register policies, also in child processes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ultraep.errors import ConfigError, FileError
from ultraep.policies import policy_names

VARIABLE = "ULTRAEP_IMPORTED"  # passes the imports of a command on to its child processes


def import_policies(names: Sequence[str]) -> None:
    """Import files and modules; raise if one of them fails or registers no policy."""
    for name in dict.fromkeys(names):
        known = policy_names()
        if _import(name) and policy_names() == known:
            raise ConfigError(
                f"--import {name}: registers no policy; decorate a function with "
                '@ultraep.register_policy("NAME")'
            )
    if names:
        os.environ[VARIABLE] = os.pathsep.join(names)


def import_in_child() -> None:
    """Import what the command in the parent process imported."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        _import(name)


def _import(name: str) -> bool:
    """Import a file or a module; return whether it was new."""
    folder, module = Path.cwd(), name
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise FileError(f"--import {name}: no such file")
        folder, module = Path(name).resolve().parent, Path(name).stem
    if module in sys.modules:
        return False
    sys.path.insert(0, str(folder))
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # beside the user's file
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001  anything that the file raises
        raise ConfigError(f"--import {name}: {type(error).__name__}: {error}") from None
    finally:
        sys.dont_write_bytecode = writes
    return True
