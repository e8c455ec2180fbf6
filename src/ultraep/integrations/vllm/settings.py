"""Settings of the plug-in: from the environment, and from `--additional-config`.

ULTRAEP_SLOTS=1 vllm serve MODEL --data-parallel-size 2 --enable-expert-parallel --enforce-eager
vllm serve MODEL ... --additional-config '{"ultraep": {"slots": 1}}'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ultraep.config import BalanceConfig
from ultraep.errors import ConfigError
from ultraep.policies import get_policy

KEY = "ultraep"  # in the additional configuration
PREFIX = "ULTRAEP_"  # in the environment
OTHERS = {"ULTRAEP_TRACE", "ULTRAEP_RATES"}  # variables with that prefix that are read elsewhere


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """What a user asks for.

    slots: spare slots of every rank, in every layer; 0: nothing is balanced.
    policy, tolerance: see `BalanceConfig`.
    record: folder for a trace of every microbatch; None: as ULTRAEP_TRACE says.
    min_rows: rows that a copy must serve to be worth its way; batches with fewer on a rank are left
        alone. None: as many as pay for the bytes of an expert (`cost`).
    keep: slots for every layer, so that copies are still there in its next batch; otherwise all
        layers share one set, and copies are sent in every batch.
    """

    slots: int = 1
    policy: str = "ultraep"
    tolerance: float = 0.0
    record: str | None = None
    min_rows: int | None = None
    keep: bool = True

    def __post_init__(self) -> None:
        _check_count("slots", self.slots, least=0)
        if self.min_rows is not None:
            _check_count("min_rows", self.min_rows, least=1)
        if not isinstance(self.keep, bool):
            raise ConfigError(f"keep must be true or false, got {self.keep!r}")
        if self.record is not None and not (isinstance(self.record, str) and self.record):
            raise ConfigError(f"record must be the name of a folder, got {self.record!r}")
        BalanceConfig(policy=self.policy, tolerance=self.tolerance)
        get_policy(self.policy)


def read_settings(environment: Mapping[str, str], additional: Any) -> ServingSettings | None:
    """The settings that are given; None: nothing was asked for.

    additional: vLLM's additional configuration, whose part `ultraep` is ours.
    """
    here, there = _from_environment(environment), _from_additional(additional)
    if here is None and there is None:
        return None
    here, there = here or {}, there or {}
    for name in here.keys() & there.keys():
        if here[name] != there[name]:
            raise ConfigError(
                f"{PREFIX}{name.upper()} is {here[name]!r}, and the additional configuration has "
                f"{there[name]!r}: give one of them"
            )
    settings = ServingSettings(**here, **{n: v for n, v in there.items() if n not in here})
    return settings if settings.slots else None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any] | None:
    names = {f"{PREFIX}{name.upper()}": name for name in READERS}
    texts = {n: t for n, t in environment.items() if n.startswith(PREFIX) and n not in OTHERS}
    _check_names(texts, names)
    return {
        names[key]: _value(key, text, *READERS[names[key]]) for key, text in texts.items()
    } or None


def _from_additional(additional: Any) -> dict[str, Any] | None:
    if not isinstance(additional, Mapping) or KEY not in additional:
        return None
    values = additional[KEY]
    if not isinstance(values, Mapping):
        raise ConfigError(
            f'the additional configuration needs {{"{KEY}": {{...}}}}, got {values!r}'
        )
    _check_names(values, READERS)
    return dict(values)


def _check_names(names: Iterable[str], known: Mapping[str, Any]) -> None:
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise ConfigError(f"no such setting: {', '.join(unknown)}; {', '.join(known)}")


def _check_count(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")


def _value(key: str, text: str, read: Callable[[str], Any], kind: str) -> Any:
    try:
        return read(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{key} must be {kind}, got {text!r}") from None


READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "slots": (int, "an integer"),
    "policy": (str, "text"),
    "tolerance": (float, "a number"),
    "record": (str, "text"),
    "min_rows": (int, "an integer"),
    "keep": ({"0": False, "1": True}.__getitem__, "0 or 1"),
}
