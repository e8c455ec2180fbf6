"""Options that take several values with commas between them."""

from __future__ import annotations

from ultraep.errors import ConfigError

MOST = 1 << 20  # numbers of ranges are less


def names_in(text: str, option: str) -> list[str]:
    """The names, each once.

    >>> names_in("none, eplb,none", "--policy")
    ['none', 'eplb']
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{option} must name at least one, got {text!r}")
    return list(dict.fromkeys(names))


def numbers_in(text: str, option: str) -> list[int]:
    """The numbers, each once."""
    try:
        return [int(number) for number in names_in(text, option)]
    except ValueError:
        raise ConfigError(f"{option} must be numbers like 1,2, got {text!r}") from None


def ranges_in(text: str, option: str) -> list[int]:
    """The numbers of a list that has ranges as well, each once and in order.

    >>> ranges_in("7,0-2", "--layers")
    [0, 1, 2, 7]
    """
    numbers: set[int] = set()
    for part in names_in(text, option):
        first, _, last = part.partition("-")
        try:
            begin, end = int(first), int(last or first)
        except ValueError:
            raise ConfigError(f"{option} must be numbers like 0-3,7, got {text!r}") from None
        if not 0 <= begin <= end < MOST:
            raise ConfigError(f"{option} {part}: a range runs from 0 or more upwards")
        numbers.update(range(begin, end + 1))
    return sorted(numbers)
