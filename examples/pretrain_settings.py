"""The settings of pretrain.py, how they are read and checked.

Each section of the TOML file is a class, each setting a field. Integers are at least 1 and floats
at least 0, unless the field has another `least`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import ultraep
from ultraep.errors import ConfigError, FileError
from ultraep_tools.demo.model import ModelConfig

TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def number(default: float, *, least: int) -> Any:
    return field(default=default, metadata={"least": least})


def one_of(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class Training:
    steps: int = 1000
    batch: int = 32  # windows per step, of all ranks
    length: int = 128  # bytes per window
    microbatches: int = 1  # per step
    in_flight: int = 1  # forward passes before the first backward
    lr: float = 3e-3
    final_lr: float = 0.1  # fraction of lr at the end
    warmup: int = number(50, least=0)
    weight_decay: float = 0.1
    clip: float = 1.0  # largest gradient norm; 0: no clipping
    even: float = 0.01  # weight of the auxiliary load-balancing loss
    precision: str = one_of("float32", "float32", "bfloat16", "float64")
    recompute: bool = False  # recompute activations in backward
    seed: int = number(0, least=0)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    ep: int = number(0, least=0)  # ranks of an expert-parallel group; 0: all
    device: str = one_of("cpu", "cpu", "cuda")
    timeout: float = number(0.0, least=0)  # seconds to wait for a rank; 0: the timeout of torch


@dataclass(frozen=True, kw_only=True)
class Balance:
    policy: str = one_of("ultraep", *ultraep.policy_names())
    tolerance: float = 0.0
    slots: int = number(1, least=0)
    domain: int = number(0, least=0)  # ranks joined by the fast link; 0: the whole group


@dataclass(frozen=True, kw_only=True)
class Data:
    files: list[str] = field(default_factory=list)  # or folders; none: Python's library
    pattern: str = "*.txt"  # of the files in a folder
    held_out: int = number(20, least=2)  # every 20th window is held out


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    every: int = 100  # steps
    windows: int = 64


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    folder: str = "runs/pretrain"
    every: int = 200  # steps
    keep: int = 3


@dataclass(frozen=True, kw_only=True)
class Logging:
    folder: str = "runs/pretrain"
    every: int = 10  # steps
    tensorboard: bool = True
    record: str = ""  # folder for traces of every microbatch; "": none


@dataclass(frozen=True, kw_only=True)
class Settings:
    model: ModelConfig = field(default_factory=ModelConfig)
    training: Training = Training()
    parallel: Parallel = Parallel()
    balance: Balance = Balance()
    data: Data = field(default_factory=Data)
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    logging: Logging = Logging()

    def group_size(self, ranks: int) -> int:
        """Return the number of ranks that the experts are spread over."""
        return self.parallel.ep or ranks

    def check(self, ranks: int) -> None:
        """Raise if the settings do not fit each other or the number of ranks."""
        model, training, ep = self.model, self.training, self.group_size(ranks)
        parts = training.microbatches * ranks
        refused = {
            f"model.top_k {model.top_k} is more than model.experts {model.experts}": (
                model.top_k > model.experts
            ),
            f"balance.slots {self.balance.slots} is more than model.experts {model.experts}": (
                self.balance.slots > model.experts
            ),
            f"parallel.ep {ep} does not divide {ranks} ranks": ranks % ep,
            f"balance.domain {self.balance.domain} does not divide a group of {ep} ranks": (
                ep % (self.balance.domain or ep)
            ),
            f"training.batch {training.batch} does not divide among "
            f"{training.microbatches} microbatches x {ranks} ranks": training.batch % parts,
            f"training.in_flight {training.in_flight} is more than "
            f"training.microbatches {training.microbatches}": (
                training.in_flight > training.microbatches
            ),
            f"training.final_lr {training.final_lr} is a share of training.lr, at most 1": (
                training.final_lr > 1
            ),
        }
        for message, wrong in refused.items():
            if wrong:
                raise ConfigError(message)


def read_settings(path: str | None, changes: Iterable[str] = ()) -> Settings:
    """Read a TOML file, or the defaults, then apply changes `section.key=value`."""
    content = read_toml(path) if path else {}
    for change in changes:
        name, equals, value = change.partition("=")
        section, dot, key = name.strip().partition(".")
        if not (equals and dot):
            raise ConfigError(f"--set wants section.key=value, got {change!r}")
        part = content.setdefault(section, {})
        if isinstance(part, dict):
            part[key] = toml_value(value.strip())
    return settings_of(content)


def read_toml(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: {error}") from None


def toml_value(text: str) -> Any:
    """Parse a TOML value; invalid TOML is text, so that names need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def settings_of(content: dict[str, Any]) -> Settings:
    sections = get_type_hints(Settings)
    for name, values in content.items():
        if name not in sections:
            raise ConfigError(f"unknown section [{name}]; there are {', '.join(sections)}")
        if not isinstance(values, dict):
            raise ConfigError(f"[{name}] is a section, got {values!r}")
    return Settings(
        **{name: section_of(name, sections[name], values) for name, values in content.items()}
    )


def section_of(section: str, cls: type, values: dict[str, Any]) -> Any:
    known, hints = {f.name: f for f in fields(cls)}, get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown setting {section}.{key}; there are {', '.join(known)}")
        check_value(f"{section}.{key}", value, hints[key], known[key].metadata)
    return cls(**values)


def check_value(name: str, value: Any, expected: Any, limits: Any) -> None:
    if expected == list[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} must be a list of texts, got {value!r}")
        return
    types = (int, float) if expected is float else expected
    if not isinstance(value, types) or (isinstance(value, bool) and expected is not bool):
        raise ConfigError(f"{name} must be {TYPES[expected]}, got {value!r}")
    choices = limits.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    if expected in (int, float):
        least = limits.get("least", 1 if expected is int else 0)
        if not (value >= least and math.isfinite(value)):
            raise ConfigError(f"{name} must be at least {least}, and finite, got {value}")
