"""The library itself: whether it is there, and of which version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ultraep.errors import BackendUnavailable, ConfigError

OLDEST, NEXT = (5, 22), 6  # that has what is used here, and that may have something else


def check_library() -> None:
    """Raise if transformers is missing, or of a version that has another registry of experts."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        raise BackendUnavailable(
            "transformers is not installed: pip install 'ultraep[transformers]'"
        ) from None
    major, minor = (int(number) for number in found.split(".")[:2])
    if not OLDEST <= (major, minor) < (NEXT, 0):
        oldest = ".".join(str(number) for number in OLDEST)
        raise ConfigError(
            f"transformers {oldest} to {OLDEST[0]}.x is needed, and {found} is installed"
        )
