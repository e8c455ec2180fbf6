"""The docs site, without Sphinx: contents, links, API pages, the tutorial."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import ultraep

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


@pytest.fixture
def build(load):
    load("notebook")
    load("search")
    return load("build")


def anchors(page):
    """The anchors of the headings of a Markdown page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_contents_and_links(build, tmp_path):
    build.stage(tmp_path)
    pages = {str(page.relative_to(tmp_path)) for page in tmp_path.rglob("*.md")}
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (tmp_path / "index.md").read_text(), re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and line[0] != ":"]
    listed += [f"api/{page}" for page in build.API]
    assert sorted(f"{page}.md" for page in listed) == sorted(pages - {"index.md"})
    for page in pages:
        for _, target, rest in build.LINK.findall((tmp_path / page).read_text()):
            if re.match(r"\w+:", target):
                continue
            path = (tmp_path / page).parent / target
            assert path.is_file(), f"{page}: {target}"
            if match := re.match(r"#([\w-]+)\)", rest):
                assert match[1] in anchors(path), f"{page}: {target}{rest}"


def test_api_pages_list_every_public_name_once(build, tmp_path):
    build.stage_api(tmp_path / "api")
    text = "\n".join(page.read_text() for page in (tmp_path / "api").glob("*.md"))
    documented = re.findall(r"^\.\. auto\w+:: ultraep\S*\.(\w+)$", text, re.MULTILINE)
    assert set(ultraep.__all__) - {"__version__", "workload"} <= set(documented)
    assert len(documented) == len(set(documented)) + 1  # `serve` of ultraep and of metrics
    assert ".. autoclass:: ultraep.Balancer" in text
    assert ".. autoexception:: ultraep.LoadError" in text


@pytest.mark.slow
def test_the_tutorial_runs(load):
    module = load("notebook")
    notebook = module.read(ROOT / "docs" / "tutorial.ipynb")
    stored = [cell["outputs"] for cell in module.cells_of(notebook, "code")]
    module.run(notebook)
    outputs = [cell["outputs"] for cell in module.cells_of(notebook, "code")]
    assert [bool(output) for output in outputs] == [bool(output) for output in stored]
    assert outputs[0] == stored[0]  # plans are the same everywhere
    assert any("outputs are equal\n" in output[0]["text"] for output in outputs if output)
