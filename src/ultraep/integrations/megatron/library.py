"""The library itself: whether it is there, and of which version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ultraep.errors import BackendUnavailable, ConfigError

KNOWN = (0, 16)  # whose layers, experts and hooks are used here


def check_library() -> None:
    """Raise if Megatron-Core is missing, or of a version that nobody has looked at."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        raise BackendUnavailable(
            "Megatron-Core is not installed: pip install 'ultraep[megatron]'"
        ) from None
    if tuple(found.split(".")[:2]) != tuple(str(number) for number in KNOWN):
        known = ".".join(str(number) for number in KNOWN)
        raise ConfigError(f"Megatron-Core {known}.x is needed, and {found} is installed")
