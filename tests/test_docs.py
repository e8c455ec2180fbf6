"""Python blocks and docstrings run, names exist, and the docs site has its pages and links."""

import builtins
import doctest
import importlib.util
import re
import sys
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer.main

import ultraep
from ultraep import policies
from ultraep_tools.cli.commands import SUMMARIES, app, load_command

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "examples/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "integrations").glob("*.md")),
]
SOURCES = [
    path
    for folder in ("src", "examples", "benchmarks", "tests")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks", "tests/soak", "src/ultraep_tools/demo")
    for path in sorted((ROOT / folder).glob("*.py"))
]
FILE = re.compile(r"[\w./*-]+\.(py|toml|md|json|jsonl|txt|npz|npy|html|svg)|[\w-]+(/[\w-]+)+/?")
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(\(.*\))?")
CALL_OR_SNAKE = re.compile(r"([A-Za-z_]\w*)\(.*\)|([a-z]+(?:_[a-z]+)+)")
CLASS = re.compile(r"([A-Z][a-z]+(?:[A-Z][a-z]*)+|[A-Z]\w+Error)(?:(?::| \.\.\.).*)?")
OPTION = re.compile(r"--[a-z][a-z-]*")
OTHER_PROGRAMS = {"--nproc-per-node", "--nnodes", "--logdir", "--shm-size", "--durations", "--help"}
OTHER_PROGRAMS |= {"--max-restarts", "--require-hashes"}
# Files that a user or a run creates.
CREATED = re.compile(
    r"(.*/)?(run|loads|routing|out|my|plan|model|result|scalars|report|header|FILE|\d+)\.\w+"
    r"|FOLDER/.*|run/\d+|(none|ultraep)/trace|share/.*|TFLOP/s|GB/s|max/mean|plan/quality|\.\w+|.*//.*"
)


def spans(page):
    """Code inside sentences."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return sorted(set(re.findall(r"`([^`\n]+)`", text)))


@cache
def words():
    data = [path for kind in ("*.toml", "*.json") for path in (ROOT / "src").rglob(kind)]
    data += [*SOURCES, *ROOT.glob("examples/*.toml"), *ROOT.glob("benchmarks/*.toml")]
    return set(re.findall(r"\w+", "\n".join(path.read_text() for path in data)))


@cache
def files():
    """Every path of the project; caches, environments and build folders are left out."""
    own = [
        path
        for path in ROOT.iterdir()
        if path.name in (".ci", ".github") or not path.name.startswith((".", "build"))
    ]
    inside = [path for folder in own if folder.is_dir() for path in folder.rglob("*")]
    return [f"/{path.relative_to(ROOT)}" for path in [*own, *inside]]


@cache
def options():
    """Options of all commands and scripts; fields of settings are options of scripts."""
    commands = [typer.main.get_command(app), *map(load_command, SUMMARIES)]
    commands += load_command("trace").commands.values()
    known = {name for command in commands for option in command.params for name in option.opts}
    for path in SCRIPTS:
        text = path.read_text()
        known.update(re.findall(r'"(--[a-z-]+)"', text))
        fields = re.findall(r"^    (\w+):", text, re.MULTILINE)
        known.update(f"--{name.replace('_', '-')}" for name in fields)
    return known | {f"--no-{name[2:]}" for name in known} | OTHER_PROGRAMS


def exists(span):
    """Whether a span names something that exists; None if it names nothing that can be checked."""
    if CREATED.fullmatch(span):
        return None
    if FILE.fullmatch(span):
        return any(fnmatchcase(path, f"*/{span.rstrip('/')}") for path in files())
    if match := DOTTED.fullmatch(span) or CALL_OR_SNAKE.fullmatch(span) or CLASS.fullmatch(span):
        names = next(filter(None, match.groups())).split(".")
        return all(name in words() or hasattr(builtins, name) for name in names)
    named = OPTION.findall(span)
    return options().issuperset(named) if named else None


def test_names_exist():
    named = [(page.name, span) for page in PAGES for span in spans(page)]
    checked = {(page, span): exists(span) for page, span in named}
    assert [name for name, known in checked.items() if known is False] == []
    assert sum(known is not None for known in checked.values()) > 500


def test_missing_names_are_detected():
    wrong = ("ultraep_tools.sim.zebra", "Plan.zebra", "topology.zebra", "zebra.py", "make_zebra()")
    assert not any(map(exists, (*wrong, "a_zebra", "--no-such-option", "ZebraError: rank 3")))


def test_every_page_is_listed_once():
    table = (ROOT / "docs" / "README.md").read_text()
    listed = re.findall(r"^\| \[[^]]+\]\(([^)#]+)", table, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(listed)


SRC = Path(ultraep.__file__).parents[1]
MODULES = [
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for package in ("ultraep", "ultraep_tools")
    for path in sorted((SRC / package).rglob("*.py"))
    if ">>> " in path.read_text() and "kernels" not in path.parts
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    optional = ".integrations." in name or ".triton." in name
    module = pytest.importorskip(name, exc_type=ImportError) if optional else import_module(name)
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted > 0


# test_examples.py runs it under torchrun.
FIRST = (ROOT / "examples" / "first.py").read_text()
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    if block != FIRST
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, monkeypatch):
    import numpy as np

    import ultraep

    for name in policies.policy_names():
        policies.get_policy(name)  # import all before the registry is copied
    monkeypatch.setattr(policies, "_registry", dict(policies._registry))
    topology = ultraep.Topology(ranks=8, experts=32, slots=1)
    loads = ultraep.workload.zipf(8, 32, ratio=2.0, top_k=4, tokens=64)
    exec(
        block, {"np": np, "torch": torch, "ultraep": ultraep, "topology": topology, "loads": loads}
    )


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
