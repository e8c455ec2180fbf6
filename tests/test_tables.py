"""Measured tables of the pages are written from results, and pages quote no other numbers."""

import pytest
import tables

SPECIFIED = tables.specifications()


def test_pages_have_the_tables_that_the_script_writes():
    names = []
    for path in tables.pages():
        text = path.read_text()
        assert tables.page_with_tables(text, SPECIFIED["table"]) == text, path
        names += [match[1] for match in tables.MARKED.finditer(text)]
    assert sorted(names) == sorted([*SPECIFIED["table"], tables.SOURCES])


def test_numbers_beside_a_link_to_a_result_are_in_it():
    for path in tables.pages():
        explained = SPECIFIED["explained"].get(str(path.relative_to(tables.ROOT)), {})
        assert tables.unknown_numbers(path.read_text(), explained) == [], path


def test_other_numbers_are_detected():
    link = "([tables](../benchmarks/results/ranks_quick_h200_202611.txt))"
    page = "<!-- table layer -->\n| old |\n<!-- end -->"
    assert tables.page_with_tables(page, SPECIFIED["table"]) != page
    assert tables.unknown_numbers(f"A step took 163.2 ms {link}.\n\nIt took 12.34 ms.") == []
    assert tables.unknown_numbers(f"A step took 12.34 ms {link}.") == [
        "12.34 ms of ranks_quick_h200_202611"
    ]


def test_a_cell_needs_exactly_one_number():
    with pytest.raises(SystemExit, match="needs one"):
        tables.value_of("ranks_quick_h200", "step_time_p50", {"variant": "none"})
    with pytest.raises(SystemExit, match="0 numbers of zebras"):
        tables.value_of("ranks_quick_h200", "zebras", {})
