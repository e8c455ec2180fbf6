"""Settings of a plug-in, from the environment or, with vLLM, from `--additional-config`.

ULTRAEP_SLOTS=1 python -m sglang.launch_server ...
ULTRAEP_SLOTS=1 vllm serve MODEL --data-parallel-size 2 --enable-expert-parallel
vllm serve MODEL ... --additional-config '{"ultraep": {"slots": 1}}'
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ultraep.config import BalanceConfig, check_integer
from ultraep.errors import ConfigError
from ultraep.policies import running_policy

KEY = "ultraep"  # in the additional configuration
PREFIX = "ULTRAEP_"  # in the environment
READ_ELSEWHERE = {"ULTRAEP_TRACE", "ULTRAEP_RATES", "ULTRAEP_FLIGHT"}


@dataclass(frozen=True, kw_only=True)
class ServingSettings:
    """Settings of the plug-in.

    slots: spare slots of every rank; 0: balance nothing.
    policy, tolerance: see `BalanceConfig`.
    record: directory for a trace of every microbatch; None: the value of ULTRAEP_TRACE.
    min_rows: fewest rows that a replica may serve. Batches with fewer rows per rank are not
        balanced. None: measured rates say which replicas pay.
    """

    slots: int = 1
    policy: str = "ultraep"
    tolerance: float = 0.0
    record: str | None = None
    min_rows: int | None = None

    def __post_init__(self) -> None:
        check_integer("slots", self.slots, least=0)
        if self.min_rows is not None:
            check_integer("min_rows", self.min_rows, least=1)
        if self.record is not None and not (isinstance(self.record, str) and self.record):
            raise ConfigError(f"record must be the path of a directory, got {self.record!r}")
        BalanceConfig(policy=self.policy, tolerance=self.tolerance)
        running_policy(self.policy)


def read_settings(environment: Mapping[str, str], additional: Any = None) -> ServingSettings | None:
    """Read the settings; None: no setting is given, or slots is 0.

    additional: vLLM's additional configuration; only its key `ultraep` is read.
    """
    variables, config = _from_environment(environment), _from_additional(additional)
    if not variables and config is None:
        return None
    config = config or {}
    for name in variables.keys() & config.keys():
        if variables[name] != config[name]:
            raise ConfigError(
                f"{PREFIX}{name.upper()} is {variables[name]!r}, but the additional "
                f"configuration has {config[name]!r}: set only one of them"
            )
    settings = ServingSettings(**(config | variables))
    return settings if settings.slots else None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {f"{PREFIX}{name.upper()}": name for name in READERS}
    variables = {name for name in environment if name.startswith(PREFIX)} - READ_ELSEWHERE
    _check_names(variables, names)
    values = {}
    for variable in variables:
        (read, expected), text = READERS[names[variable]], environment[variable]
        try:
            values[names[variable]] = read(text)
        except ValueError:
            raise ConfigError(f"{variable} must be {expected}, got {text!r}") from None
    return values


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
        raise ConfigError(f"unknown setting {', '.join(unknown)}; choose from {', '.join(known)}")


READERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "slots": (int, "an integer"),
    "policy": (str, "text"),
    "tolerance": (float, "a number"),
    "record": (str, "text"),
    "min_rows": (int, "an integer"),
}
