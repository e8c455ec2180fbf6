"""Names in the documentation exist: modules, classes, functions, files, options, messages."""

import ast
import builtins
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
import typer.main

from ultraep.tools.cli.commands import SUMMARIES, app, load_command

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
    for folder in ("examples", "benchmarks", "src/ultraep/tools/demo", "src/ultraep/tools/tiny")
    for path in sorted((ROOT / folder).glob("*.py"))
]
FILE = re.compile(r"[\w./*-]+\.(py|toml|md|json|jsonl|txt|npz|npy|html|svg)|[\w-]+(/[\w-]+)+/?")
DOTTED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(\(.*\))?")
CALL = re.compile(r"([A-Za-z_]\w*)\(.*\)")
CAMEL = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]*)+|[A-Z]\w+Error")
SNAKE = re.compile(r"[a-z]+(?:_[a-z]+)+")
OPTION = re.compile(r"--[a-z][a-z-]*")
MESSAGE = re.compile(r"([A-Z]\w+)(?::| \.\.\.) ?(.*)")
OTHER_PROGRAMS = {"--nproc-per-node", "--nnodes", "--logdir", "--shm-size", "--help"}  # torchrun
# Files that a user or a run makes, not the project.
MADE = re.compile(
    r"(.*/)?(run|loads|routing|out|my|plan|model|result|scalars|report|header|FILE|\d+)\.\w+"
    r"|FOLDER/.*|(none|ultraep)/trace|share/.*|TFLOP/s|GB/s|max/mean|plan/quality|\.\w+|.*//.*"
)


def spans(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return sorted(set(re.findall(r"`([^`\n]+)`", text)))


CASES = [pytest.param(span, id=f"{page.name}: {span}") for page in PAGES for span in spans(page)]


@cache
def index():
    """Names of modules, by file, and of members of classes, by class."""
    modules, classes = {}, {}
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        modules.setdefault(path.stem, set()).update(names_in(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, set()).update(names_in(node), *bases(node))
    return modules, classes


def names_in(node):
    """What is defined in a module or class, attributes of `self` too; no local names."""
    for one in node.body:
        if isinstance(one, (ast.FunctionDef, ast.ClassDef)):
            yield one.name
            yield from attributes(one)
        elif isinstance(one, ast.If):
            yield from names_in(one)
        elif isinstance(one, (ast.Assign, ast.AnnAssign)):
            yield from (name.id for name in ast.walk(one) if isinstance(name, ast.Name))


def attributes(function):
    for one in ast.walk(function):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            yield one.attr


def bases(node):
    """A class of torch has more members than stand here."""
    return [dir(torch_module())] if any("Module" in ast.unparse(b) for b in node.bases) else []


def torch_module():
    import torch

    return torch.nn.Module


@cache
def words():
    """Every word of the sources and of their data."""
    kinds = ("*.toml", "*.json")
    data = [path for kind in kinds for path in (ROOT / "src").rglob(kind)]
    data += [*SOURCES, *ROOT.glob("examples/*.toml")]
    return set(re.findall(r"\w+", "\n".join(path.read_text() for path in data)))


@cache
def files():
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".git" not in path.parts]


@cache
def options():
    """Of the command, and of the scripts, whose options are fields of settings as well."""
    group = typer.main.get_command(app)
    found = set(OTHER_PROGRAMS)
    commands = [group, *map(load_command, SUMMARIES)]
    for name in ("bench", "trace"):
        commands += load_command(name).commands.values()
    for command in commands:
        found.update(name for parameter in command.params for name in parameter.opts)
    for path in SCRIPTS:
        text = path.read_text()
        fields = re.findall(r"^    (\w+):", text, re.MULTILINE)
        found.update(re.findall(r'"(--[a-z-]+)"', text))
        found.update(f"--{name.replace('_', '-')}" for name in fields)
    return found | {f"--no-{name[2:]}" for name in found}


@cache
def messages():
    """All text of the sources, without what is filled in."""
    text = "\n".join(path.read_text() for path in SOURCES if "src" in path.parts)
    return re.sub(r'"\s*\n\s*f?"', "", text)


# -- what is checked -----------------------------------------------------------------------------


def exists(span):
    """None: nothing that can be checked; else whether it is there."""
    if FILE.fullmatch(span) and not MADE.fullmatch(span):
        return is_file(span)
    if match := DOTTED.fullmatch(span):
        return None if MADE.fullmatch(span) else resolves(match[1])
    if match := CALL.fullmatch(span):
        return match[1] in words() or hasattr(builtins, match[1])
    if CAMEL.fullmatch(span):
        return span in index()[1] or hasattr(builtins, span)
    if SNAKE.fullmatch(span):
        return span in words()
    if match := MESSAGE.fullmatch(span):
        return match[1] in index()[1] and is_said(match[2])
    named = OPTION.findall(span)
    return all(name in options() for name in named) if named else None


def is_file(span):
    wanted = re.escape(span.rstrip("/")).replace(r"\*", ".*")
    return any(re.fullmatch(f"(.*/)?{wanted}", name) for name in files())


def resolves(dotted):
    first, *rest = dotted.split(".")
    if first in ("ultraep", "torch", "np"):
        return attribute({"np": "numpy"}.get(first, first), rest)
    if (ROOT / "src" / "ultraep" / first).is_dir() and attribute("ultraep", [first, *rest]):
        return True
    modules, classes = index()
    if first in classes:
        return rest[0] in classes[first]
    if first in modules and rest[0] in modules[first]:
        return True
    # A value: `plan.lower_bound`. Some class has such a member, if no module has that name.
    return first not in modules_only() and any(rest[0] in members for members in classes.values())


def modules_only():
    """Names of modules that are no names of values in the documentation."""
    return index()[0].keys() - {"plan", "balancer", "trace", "layer"}


def attribute(module, rest):
    found = importlib.import_module(module)
    for number, name in enumerate(rest):
        try:
            found = importlib.import_module(f"{found.__name__}.{name}")
        except (ImportError, AttributeError):
            if not hasattr(found, name):
                return stands_in_sources(getattr(found, "__name__", ""), rest[number:])
            found = getattr(found, name)
    return True


def stands_in_sources(package, rest):
    """Whether a module that cannot be imported, for want of a framework, names it."""
    folder = (ROOT / "src").joinpath(*package.split("."), rest[0])
    paths = [path for path in (folder / "__init__.py", folder.with_suffix(".py")) if path.is_file()]
    named = set(re.findall(r"\w+", "".join(path.read_text() for path in paths)))
    return bool(paths) and named.issuperset(rest[1:])


def is_said(words_of_message):
    """Parts between numbers and dots stand in the sources; last words may be filled in."""
    parts = [part.strip(" :,") for part in re.split(r"\d+|\.\.\.", words_of_message)]
    return all(part in messages() or is_filled_in(part) for part in parts)


def is_filled_in(part):
    text = part.split(" ")
    halves = ((" ".join(text[:n]), " ".join(text[n:])) for n in range(1, len(text)))
    return any(f"{head} {{" in messages() and f'"{last}"' in messages() for head, last in halves)


@pytest.mark.parametrize("span", CASES)
def test_what_is_named_exists(span):
    assert exists(span) is not False


@pytest.mark.parametrize(
    "span",
    [
        *(
            "relay.schedule",
            "ultraep.tools.sim.nothing",
            "Plan.nothing",
            "nothing.py",
            "sim/nothing.py",
        ),
        *("make_nothing()", "NothingBalancer", "no_such_name", "--no-such-option", "NothingError"),
        *("SlotError: ... still in use", "PlanMismatch: ranks disagree about the weather"),
        "Balancer.nothing()",
    ],
)
def test_what_does_not_exist_is_noticed(span):
    assert exists(span) is False


def test_much_is_checked():
    assert sum(exists(case.values[0]) is not None for case in CASES) > 150


def test_no_page_is_listed_twice():
    listed = re.findall(r"^\| \[([^]]+)\]", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(listed)
