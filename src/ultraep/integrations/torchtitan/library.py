"""The framework itself: whether it is there, and of which version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ultraep.errors import BackendUnavailable, ConfigError

TESTED = "0.3"  # releases move the classes that are overridden here


def check_library() -> None:
    """Raise if torchtitan is missing, or of a version whose layers are others."""
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise BackendUnavailable(
            "torchtitan is not installed: pip install 'ultraep[torchtitan]'"
        ) from None
    if found.split(".")[:2] != TESTED.split("."):
        raise ConfigError(f"torchtitan {TESTED}.x is needed, and {found} is installed")
