"""The library itself: whether it is there, and of which version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ultraep.errors import BackendUnavailable, ConfigError

MAJOR = 5


def check_library() -> None:
    """Raise if transformers is missing, or of a version that has another registry of experts."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise BackendUnavailable(
            "transformers is not installed: pip install 'ultraep[transformers]'"
        ) from None
    if int(found.partition(".")[0]) != MAJOR:
        raise ConfigError(f"transformers {MAJOR} is needed, and {found} is installed")
