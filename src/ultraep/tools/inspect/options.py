"""Options of an inspection."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ultraep.errors import ConfigError
from ultraep.policies import get_policy

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Model, texts, numbers of ranks and policies. Pass either model or family."""

    model: Path | None = None
    family: str | None = None
    files: tuple[Path, ...] = ()
    tokens: int = 8192  # per text
    window: int = 4096
    sequence: int = 512
    layers: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None
    slots: tuple[int, ...] = (1, 2)
    policies: tuple[str, ...] = ("none", "eplb", "quota", "ultraep")
    history: int = 1
    device: str | None = None
    dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.model is None) == (self.family is None):
            raise ConfigError("pass the directory of a model or --random FAMILY, not both")
        for name in self.policies:
            get_policy(name)
        if self.history < 1:
            raise ConfigError(f"--history must be at least 1, got {self.history}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must lie between 0 and 2**63 - 1, got {self.seed}")

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.model.resolve().name if self.model else f"random {self.family}"
