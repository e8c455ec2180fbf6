"""Crashes: what the ranks of a crashed or hanging run did last, and who waits for whom.

Joins the flight files of all ranks (`ultraep.trace.flight`).

    crash = read_crash("flight/2f8a...")
    print(crash.explain())   who waits for whom, who was where, whose digests differ
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ultraep.errors import FileError
from ultraep.files.reading import read_text, reading
from ultraep.trace.flight import (
    FORMAT,
    KINDS,
    MISMATCH,
    STAGES,
    VERSION,
    FlightFile,
    Pass,
)
from ultraep.trace.schema import MOST_RANKS
from ultraep_tools.report.words import counted

RANK_FILE = re.compile(r"rank-(\d{5})\.json")
TYPES = tuple(get_type_hints(Pass).values())  # of the columns; older files lack the last one
MOST_SECONDS = 1e11  # since 1970; longer ones are damage
MOST_FILE = 4 << 20  # bytes
MOST_CRASHES = 16  # in one folder
SHOWN = 200  # characters of an error, and of a frame of a stack
FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')  # as faulthandler writes it

Key = TypeVar("Key", bound=Hashable)


def read_flight(path: str | Path) -> FlightFile:
    """Return a flight file; raise FileError if it is damaged or something else."""
    with reading(path, "a flight file"):
        record = json.loads(read_text(path, most=MOST_FILE))
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise FileError(f"{path}: not a flight file of ultraep")
        if record.get("version") != VERSION:
            raise FileError(
                f"{path}: version {record.get('version')!r} of flight files, this program reads "
                f"{VERSION}; read it with the version of ultraep that wrote it"
            )
        return _checked(record)


def _checked(record: Mapping[str, Any]) -> FlightFile:
    """Return the record of a file; raise ValueError, KeyError or TypeError if it is damaged."""
    values: dict[str, Any] = {
        **{name: int(record[name]) for name in ("rank", "ranks", "global_rank", "pid")},
        **{name: str(record[name]) for name in ("balancer", "host", "reason", "stack")},
    }
    flight = FlightFile(
        **values,
        written=float(record["written"]),
        errors=tuple(map(str, record["errors"])),
        passes=tuple(map(_pass, record["passes"])),
        named=tuple(map(int, record.get("named", ()))),
    )
    ranks, times = {flight.rank, *flight.named}, [flight.written]
    times += [seconds for each in flight.passes for seconds in (each.began, each.since)]
    if not 0 <= min(ranks) <= max(ranks) < flight.ranks <= MOST_RANKS:
        raise ValueError(f"rank {flight.rank} of {flight.ranks}, named {flight.named!r:.80}")
    if not all(abs(seconds) < MOST_SECONDS for seconds in times):
        raise ValueError("a time out of range")
    return flight


def _pass(row: list[Any]) -> Pass:
    own = Pass(*(kind(value) for kind, value in zip(TYPES, row, strict=False)))
    if own.kind not in KINDS or own.stage not in STAGES:
        raise ValueError(f"invalid pass: {row!r:.80}")
    return own


# -- all ranks -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crash:
    """The flight files of the ranks of one balancer.

    flights: by rank.   damaged: what is wrong with files that cannot be used, by rank.
    """

    folder: Path
    ranks: int
    flights: Mapping[int, FlightFile]
    damaged: Mapping[int, str]

    @property
    def missing(self) -> list[int]:
        """Ranks without a file."""
        return [r for r in range(self.ranks) if r not in self.flights and r not in self.damaged]

    @property
    def culprits(self) -> list[int]:
        """Ranks that the others wait for: missing, failed by themselves, or behind all others.

        A launcher may have ended some missing ranks after the first one. So if the errors of other
        ranks name missing ranks, these count. A rank that was late has gone on when it writes its
        file, so a rank that all others name comes before the ranks that are behind. Of several
        ranks, those count that the others had waited for, then those that the first errors name: a
        rank that was stopped finds later that the others have left.
        """
        own = {rank for rank, flight in self.flights.items() if flight.own_error}
        named_by = {rank: set(flight.named) for rank, flight in self.flights.items()}
        missing, named = set(self.missing), set[int]().union(*named_by.values())
        blamed = {
            rank
            for rank in named
            if all(rank in ranks for by, ranks in named_by.items() if by != rank and ranks)
        }
        agreed = blamed if len(blamed) == 1 else set[int]()
        certain = own or (missing & named) or missing or agreed
        return sorted(certain or self._named_first(self._late(set(self.behind) or named)))

    def _late(self, ranks: set[int]) -> set[int]:
        """Leave out ranks that have waited for more than half of the time."""
        arrived = {r: f.written - f.last.since for r, f in self.flights.items() if f.last}
        if not arrived:
            return ranks
        half = (min(arrived.values()) + min(f.written for f in self.flights.values())) / 2
        waiting = {r for r, f in self.flights.items() if f.last and f.last.waits}
        return {r for r in ranks if r not in waiting or arrived[r] > half} or ranks

    def _named_first(self, ranks: set[int]) -> set[int]:
        """Return the ranks among these that the errors name.

        The oldest error decides first. An error that names none of the remaining ranks is ignored.
        """
        for flight in sorted(self.flights.values(), key=lambda flight: flight.written):
            ranks = ranks.intersection(flight.named) or ranks
        return ranks

    @property
    def behind(self) -> list[int]:
        """Ranks that have come less far than others."""
        places = {r: f.last.place if f.last else (0, 0, 0) for r, f in self.flights.items()}
        if len(set(places.values())) < 2:
            return []
        first = min(places.values())
        return [rank for rank, place in places.items() if place == first]

    def heading(self) -> str:
        """Return the folder, how many ranks have files, and when the last one was written."""
        written = max(flight.written for flight in self.flights.values())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
        files = f"files of {len(self.flights)} of {counted(self.ranks, 'rank')}"
        return f"{self.folder}: {files}, {when}"

    def explain(self) -> str:
        """Return who waits for whom, where every rank was, and whose digests differ.

        Errors are on lines of their own, indented.
        """
        parts = self._verdict(), self._absent(), self._failed(), self._positions()
        return "\n".join(line for part in (*parts, self._digests()) for line in part)

    def _verdict(self) -> Iterator[str]:
        """Yield who is waited for."""
        culprits = self.culprits
        others = [
            rank
            for rank, flight in sorted(self.flights.items())
            if rank not in culprits and flight.last is not None and flight.last.waits
        ]
        if culprits and others:
            verb = "waits" if len(others) == 1 else "wait"
            yield f"{_subject(others)} {verb} for {_subject(culprits, 'r')}."
        differ = any(e.startswith(MISMATCH) for f in self.flights.values() for e in f.errors)
        if not culprits and len(others) > 1 and not differ:
            yield "No rank is behind: a message between them did not arrive."

    def _absent(self) -> Iterator[str]:
        if self.missing:
            yield (
                f"{_subject(self.missing)} left no file: killed, stopped, or on a host whose files "
                "are in another folder."
            )
        for rank, reason in self.damaged.items():
            yield f"The file of rank {rank} cannot be used: {reason}."

    def _failed(self) -> Iterator[str]:
        own = {rank: flight.own_error for rank, flight in sorted(self.flights.items())}
        for error, ranks in _grouped(own):
            if error:
                yield from (f"{_subject(ranks)} raised", f"  {_short(error)}")

    def _positions(self) -> Iterator[str]:
        """Yield where each rank is, the ranks that are behind last."""
        at = {
            rank: (flight.last.place, f"{_doing(flight)} {flight.last}")
            for rank, flight in sorted(self.flights.items())
            if flight.last is not None
        }
        for (_, doing), ranks in sorted(_grouped(at), reverse=True):
            flights = [self.flights[rank] for rank in ranks]
            first = max(flights, key=lambda flight: flight.since)
            clock = time.strftime("%H:%M:%S", time.localtime(first.written - first.since))
            when = "{:.1f} s before, at {}" if doing.startswith("had") else "for {:.1f} s, since {}"
            error = next((f.errors[0] for f in flights if f.errors and not f.own_error), "")
            frame = next((frame for f in flights if (frame := _own_frame(f.stack))), "")
            thread = f", with the main thread at {frame}" if frame else ""
            ending = ", and stopped with" if error else "."
            yield f"{_subject(ranks)} {doing} {when.format(first.since, clock)}{thread}{ending}"
            if error:
                yield f"  {_short(error)}"
        idle = [rank for rank, flight in sorted(self.flights.items()) if flight.last is None]
        if idle:
            yield f"{_subject(idle)} had not begun a microbatch."

    def _digests(self) -> Iterator[str]:
        """Yield the first microbatch whose loads or plans differ, or how many are equal."""
        shared: dict[tuple[int, str], dict[str, dict[int, int]]] = {}
        for rank, flight in sorted(self.flights.items()):
            for each in flight.passes:
                digests = shared.setdefault((each.number, each.where), {"loads": {}, "plans": {}})
                for name, digest in (("loads", each.loads), ("plans", each.plan)):
                    if digest:
                        digests[name][rank] = digest
        for (_, where), by_name in sorted(shared.items()):
            for name, by_rank in by_name.items():
                groups = _grouped(by_rank)
                if len(groups) > 1:
                    listed = " and ".join(_subject(ranks, "r") for _, ranks in groups)
                    yield f"The {name} of {where} differ between {listed}."
                    return
        compared = sum(len(by_name["plans"]) > 1 for by_name in shared.values())
        if compared:
            same = counted(compared, "microbatch")
            yield f"Loads and plans are equal in the {same} that ranks share."


def crash_folders(folder: str | Path) -> list[Path]:
    """Return the folder itself if it has flight files, then those below it, the newest first."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileError(f"{folder}: not a folder; name the folder of flight files")
    with reading(folder):
        candidates = [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]
    times = {path: [file.stat().st_mtime for file in _files_in(path)] for path in candidates}
    return sorted(filter(times.get, candidates), key=lambda path: max(times[path]), reverse=True)


def read_crash(folder: str | Path) -> Crash:
    """Join the flight files of a folder; files that cannot be used are named, not fatal."""
    flights, damaged = dict[int, FlightFile](), dict[int, str]()
    for path in _files_in(Path(folder)):
        rank = int(path.name[5:10])
        try:
            flight = read_flight(path)
            if flight.rank != rank:
                raise FileError(f"{path}: written by rank {flight.rank}")
            flights[rank] = flight
        except FileError as error:
            damaged[rank] = str(error).removeprefix(f"{path}: ")
    newest = max(flights.values(), key=lambda flight: flight.written, default=None)
    if newest is None:
        problem = f": {next(iter(damaged.values()))}" if damaged else ""
        raise FileError(f"{folder}: no flight file that can be read{problem}")
    for rank in [r for r, f in flights.items() if f.balancer != newest.balancer]:
        damaged[rank] = f"it belongs to balancer {flights.pop(rank).balancer}"
    kept = {rank: text for rank, text in sorted(damaged.items()) if rank < newest.ranks}
    return Crash(Path(folder), newest.ranks, flights, kept)


def _files_in(folder: Path) -> list[Path]:
    with reading(folder):
        return sorted(path for path in folder.iterdir() if RANK_FILE.fullmatch(path.name))


def _grouped(by_rank: Mapping[int, Key]) -> list[tuple[Key, list[int]]]:
    """Return the ranks that share each value."""
    groups: dict[Key, list[int]] = {}
    for rank, value in by_rank.items():
        groups.setdefault(value, []).append(rank)
    return list(groups.items())


def _subject(ranks: Iterable[int], first: str = "R") -> str:
    """Return the ranks in words, with ranges.

    >>> _subject([0, 1, 2, 5], "r"), _subject([3])
    ('ranks 0-2 and 5', 'Rank 3')
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    runs = [[f"{s[0]}-{s[-1]}"] if len(s) > 2 else list(map(str, s)) for s in spans]
    parts = [part for run in runs for part in run]
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{first}ank{'s' * (sum(map(len, spans)) > 1)} {listed}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def _doing(flight: FlightFile) -> str:
    assert flight.last is not None
    if not flight.last.open:
        return "had left"
    return "waited in" if flight.last.waits and not flight.own_error else "stayed in"


def _own_frame(stack: str) -> str:
    """Return the innermost frame of the program itself in a stack that faulthandler wrote."""
    frames = [f"{path}:{line} in {name}" for path, line, name in FRAME.findall(stack)]
    own = [frame for frame in frames if "site-packages" not in frame]
    return _short((own or frames or [""])[0])
