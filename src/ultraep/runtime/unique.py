"""What belongs to the ranks of running processes: shared by copies of a module, and in no file."""

from __future__ import annotations

from typing import Any, NoReturn, Self

from ultraep.errors import ConfigError


class Unique:
    """Copied, it stays the same; saved, it says what to save instead."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ConfigError(
            f"a {type(self).__name__} belongs to running processes and is in no file: save the "
            "state_dict() of a module (its own experts), or the full_state_dict() of a layer (all)"
        )
