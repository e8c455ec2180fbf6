"""Write the measured tables of the pages from the results in `results/`.

    python benchmarks/tables.py            # rewrites the tables between their markers
    python benchmarks/tables.py --check    # fails if a page differs

`tables.toml` has a template per table, and pages have `<!-- table NAME -->` above a table and
`<!-- end -->` below it. A cell of a template such as `{step_time_p50:.1f@variant=none}` is the only
value of this metric whose case has these entries and those of its row; `:.1f*100` scales it. The
script also lists the numbers with units in the text of a page that are in none of the results to
which their paragraph links, unless `tables.toml` explains them.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CELL = re.compile(r"\{(\w+):([^@}*]*)\*?([\d.e-]*)@?([^}]*)\}")
MARKED = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- end -->", re.DOTALL)
LINK = re.compile(r"benchmarks/results/(\w+)\.(?:txt|json)")
QUOTED = re.compile(r"(?<![\w.,-])(\d[\d,]*(?:\.\d+)?)(x| %| ms| us| MB| GB)(?![\w/])")
SOURCES = "sources"  # the table of results behind the other tables
SCALES = {
    "x": (1.0,),
    " %": (100.0,),
    " ms": (1.0, 1e-3, 1e3),
    " us": (1.0, 1e3, 1e6),
    " MB": (1.0, 1e-6),
    " GB": (1e-3, 1e-9, 1.0),
}


def specifications() -> dict[str, Any]:
    return tomllib.loads((ROOT / "benchmarks" / "tables.toml").read_text())


@cache
def rows_of(name: str) -> list[dict[str, Any]]:
    """All numbers of one result."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}_202611.json").read_text())
    return rows


def value_of(source: str, metric: str, case: Mapping[str, str]) -> float:
    """The only number of this metric and case; `benchmark` in a case is the script's section."""
    wanted = case.items()
    found = [
        row["value"]
        for row in rows_of(source)
        if row["metric"] == metric
        and wanted <= {k: str(v) for k, v in (row["case"] | _section(row)).items()}.items()
    ]
    if len(found) != 1:
        raise SystemExit(f"{source}: {len(found)} numbers of {metric} for {dict(case)}, needs one")
    return float(found[0])


def _section(row: Mapping[str, Any]) -> dict[str, str]:
    return {"benchmark": row["benchmark"]}


def table(spec: Mapping[str, Any]) -> str:
    """Return the lines of a table."""
    lines = [spec["head"].strip()]
    for entries in spec["rows"]:
        template = entries.get("row", spec.get("row", ""))
        shared = {**spec.get("case", {}), **entries.get("case", {})}
        source = entries.get("source", spec.get("source", ""))
        for name, text in {**entries, **spec}.items():  # templates first, then what they contain
            template = template.replace(f"${name}", text) if isinstance(text, str) else template
        for name, text in entries.items():
            template = template.replace(f"${name}", text) if isinstance(text, str) else template

        def cell(match: re.Match[str], shared: Any = shared, source: str = source) -> str:
            metric, form, scale, pairs = match.groups()
            own = dict(pair.split("=", 1) for pair in pairs.split(";")) if pairs else {}
            case = {key: text for key, text in {**shared, **own}.items() if text != "-"}
            return format(value_of(source, metric, case) * float(scale or 1), form)

        lines.append(CELL.sub(cell, template))
    return "\n".join(lines) + "\n"


def sources(tables: Mapping[str, Any]) -> str:
    """Return a table of the results behind all tables that come from an older version."""
    names = {spec["source"] for spec in tables.values() if "source" in spec}
    rows = [row for spec in tables.values() for row in spec["rows"]]
    names |= {row["source"] for row in rows if "source" in row}
    versions = {name: max(row["versions"]["ultraep"] for row in rows_of(name)) for name in names}
    lines = ["| result | version | date |", "|---|---|---|"]
    for name, version in sorted(versions.items()):
        if version < max(versions.values()):
            link = f"[{name}](../benchmarks/results/{name}_202611.txt)"
            lines.append(f"| {link} | {version} | {max(row['date'] for row in rows_of(name))} |")
    return "\n".join(lines) + "\n"


def page_with_tables(text: str, tables: Mapping[str, Any]) -> str:
    """Return the text of a page with all its marked tables written anew."""

    def written(match: re.Match[str]) -> str:
        name = match[1]
        lines = sources(tables) if name == SOURCES else table(tables[name])
        return f"<!-- table {name} -->\n{lines}<!-- end -->"

    return MARKED.sub(written, text)


def pages() -> Iterator[Path]:
    """All pages that may have marked tables."""
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").rglob("*.md"))


def unknown_numbers(text: str, explained: Collection[str] = ()) -> list[str]:
    """Numbers with units in paragraphs that link to results, which are in none of them."""
    unknown = []
    for paragraph in re.split(r"\n(?:\n|(?=[-|] ))", MARKED.sub("", text)):
        names = set(LINK.findall(paragraph))
        for number, unit in QUOTED.findall(re.sub(r"`[^`]*`", "", paragraph)) if names else ():
            known = any(_quotes(number, unit, name) for name in names)
            if not known and f"{number}{unit}" not in explained:
                unknown.append(f"{number}{unit} of {', '.join(sorted(names))}")
    return unknown


@cache
def _quotes(number: str, unit: str, name: str) -> bool:
    """Whether a result has this number, at its precision."""
    places = len(number.partition(".")[2])
    value, half = float(number.replace(",", "")), 0.5001 * 10**-places
    path, printed = (RESULTS / f"{name}.{kind}" for kind in ("json", "txt"))
    text = printed.read_text() if printed.is_file() else ""
    if re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", text):
        return True
    if path.is_file():
        known = [row["value"] for row in json.loads(path.read_text())]
    else:
        known = [float(digits) for digits in re.findall(r"(?<![\w.])\d+\.\d+", text)]
    shifts = (0.0, -1.0) if unit == " %" else (0.0,)  # a ratio of 1.02 is quoted as 2 %
    return any(
        abs(abs((measured + shift) * scale) - value) <= half
        for measured in known
        for scale in SCALES[unit]
        for shift in shifts
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if a page differs"
    )
    options = parser.parse_args()
    tables, explained = specifications()["table"], specifications()["explained"]
    stale, unknown = [], []
    for path in pages():
        text = path.read_text()
        written = page_with_tables(text, tables)
        if written != text:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(written)
        unknown += unknown_numbers(written, explained.get(str(path.relative_to(ROOT)), ()))
    print(*(f"{'differs' if options.check else 'written'}: {name}" for name in stale), sep="\n")
    print(*(f"in no result: {number}" for number in unknown), sep="\n")
    if unknown or (stale and options.check):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
