"""The site: all pages are reached, all links lead somewhere; the tutorial runs. Without Sphinx."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"


@pytest.fixture
def load(monkeypatch):
    def load(name):
        monkeypatch.syspath_prepend(SITE)
        spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_every_page_is_reached_and_every_link_leads_somewhere(load, tmp_path):
    load("notebook")
    build = load("build")
    build.stage(tmp_path)
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.md")}
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (tmp_path / "index.md").read_text(), re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    assert sorted(f"{page}.md" for page in listed) == sorted(pages - {"index.md"})
    for page in pages:
        for _, target, _ in build.LINK.findall((tmp_path / page).read_text()):
            if not re.match(r"\w+:", target):
                assert (tmp_path / page).parent.joinpath(target).is_file(), f"{page}: {target}"
    assert ".. autoclass:: ultraep.Balancer" in (tmp_path / "api.md").read_text()


def test_what_a_page_would_fetch_is_noticed(load, tmp_path):
    load("notebook")
    build = load("build")
    (tmp_path / "a.html").write_text(
        '<a href="https://elsewhere"></a><script src="here.js"></script>'
    )
    assert build.loads_from_elsewhere(tmp_path) == []
    for text in ('<script src="https://x"></script>', "<link href=//x>", "a { b: url(https://x) }"):
        (tmp_path / "a.html").write_text(text)
        assert len(build.loads_from_elsewhere(tmp_path)) == 1, text


@pytest.mark.slow
def test_the_tutorial_runs(load):
    module = load("notebook")
    notebook = module.read(ROOT / "docs" / "tutorial.ipynb")
    kept = [cell["outputs"] for cell in module.cells_of(notebook, "code")]
    module.run(notebook)
    found = [cell["outputs"] for cell in module.cells_of(notebook, "code")]
    assert [bool(outputs) for outputs in found] == [bool(outputs) for outputs in kept]
    assert found[0] == kept[0]  # plans are the same everywhere
    assert any("outputs are equal\n" in outputs[0]["text"] for outputs in found if outputs)


def test_the_tutorial_becomes_a_page(load):
    module = load("notebook")
    page = module.page(module.read(ROOT / "docs" / "tutorial.ipynb"))
    assert page.startswith("# Plan, inspect, balance")
    assert "imbalance 2.323 -> 1.000" in page
