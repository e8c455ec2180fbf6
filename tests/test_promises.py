"""Promises of the whole package: public names, light imports, import rings, no broad except."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import ultraep
from ultraep.supported import MEGATRON, PYTHON, SGLANG, TORCH, TORCHTITAN, TRANSFORMERS, VLLM

ROOT = Path(__file__).parent.parent
PACKAGE, TOOLS = ROOT / "src" / "ultraep", ROOT / "src" / "ultraep_tools"
MODULES = sorted(PACKAGE.rglob("*.py"))
ALL_MODULES = [*MODULES, *sorted(TOOLS.rglob("*.py"))]

# Each ring may import itself and the rings before it, also under TYPE_CHECKING.
RINGS = [
    names.split()
    for names in (
        "arrays bundle comm config errors files position supported topology",
        "backends hops loads ops passes plan policies reroute rules trace workload",
        "dispatch inputs microbatch replicas runtime",
        "dispatchers experts integrations layer metrics parallel routes routing",
        "__main__",
    )
]


def ring_of(name: str) -> int:
    return next(index for index, names in enumerate(RINGS) if name in names)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> set[str]:
    imported = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    return imported


PUBLIC = """
BackendUnavailable BalanceConfig BalancedMoE Balancer CommunicationError ConfigError Experts
ExpertsFrom FileError LoadError LocalGroup NothingToBalance Plan PlanError PlanMismatch
Problem Rates Recorder Router Routing SlotError Topology UltraEPError __version__
backend_names count_loads gather_experts plan policy_names read_trace register_policy
reorder_experts serve workload
"""


def test_public_names_are_frozen():
    assert sorted(ultraep.__all__) == PUBLIC.split()
    assert all(hasattr(ultraep, name) for name in ultraep.__all__)


def test_every_error_is_in_the_tree():
    errors = [e for e in vars(ultraep).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(error, (ultraep.UltraEPError, UserWarning)) for error in errors)


def test_imports_point_inwards():
    folders = {name for names in RINGS for name in names}
    for path in MODULES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        targets = {name.split(".")[1] for name in imports_of(path) if name.startswith("ultraep.")}
        for target in targets & folders if own != "__init__" else ():
            assert ring_of(target) <= ring_of(own), f"{path} imports {target}"


def test_the_library_imports_no_tools():
    for path in MODULES:
        assert not [name for name in imports_of(path) if name.startswith("ultraep_tools")], path


def test_no_import_circles():
    names = {module_name(path): path for path in ALL_MODULES}
    graph = {}
    for name, path in names.items():
        imported = {
            target if target in names else target.rpartition(".")[0]: None
            for target in imports_of(path)
            if target.startswith(("ultraep.", "ultraep_tools."))
        }
        graph[name] = imported.keys() & names.keys() - {name, "ultraep", "ultraep_tools"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


OPTIONAL = {"matplotlib", "numba", "plotly", "scipy", "torch", "triton", "typer", "rich"}


def test_planning_needs_and_imports_no_optional_package():
    code = f"""
import sys
for name in {sorted(OPTIONAL)}:
    sys.modules[name] = None  # importing it would raise
import numpy as np, ultraep
loads = np.array([[9, 0], [9, 0]])
plan = ultraep.plan(loads, ultraep.Topology(ranks=2, experts=2), backend="reference")
plan.check(loads)
assert plan.imbalance == 1.0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    code = f"import sys, ultraep; assert not {OPTIONAL} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_older_versions_are_refused_in_one_line():
    """Older Pythons are simulated: some of the package would not even compile there."""
    code = "import sys; sys.version_info = (3, 10, 13, 'final', 0); import {}; {}"
    expected = (
        "ultraep needs Python 3.11 or newer, this is Python 3.10.13: create the environment with "
        "a newer Python"
    )
    for module, call, start in (
        ("ultraep", "", "ultraep.errors.BackendUnavailable: "),
        ("ultraep_tools.__main__ as start", "start.main()", "ultraep: "),
    ):
        done = run_code(code.format(module, call))
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == start + expected
    assert done.stderr.count("\n") == 1
    code = """
import torch
torch.__version__ = "2.10.1+cpu"
import importlib, numpy, ultraep
ultraep.plan(numpy.array([[9, 0], [9, 0]]), ultraep.Topology(ranks=2, experts=2))
for use in (lambda: ultraep.Balancer, lambda: importlib.import_module("ultraep.runtime.local")):
    try:
        use()
    except ultraep.BackendUnavailable as error:
        print(error)
"""
    assert run_code(code).stdout.splitlines() == 2 * [
        "torch 2.11 or newer is needed, but 2.10.1+cpu is installed: pip install 'torch>=2.11'"
    ]


def test_the_versions_are_those_of_the_package_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, version in (("Python", PYTHON), ("torch", TORCH.oldest)):
        number = ".".join(map(str, version))
        assert f">={number}" in (project["requires-python"], *project["dependencies"]) or (
            f"{name}>={number}" in project["dependencies"]
        )


def test_the_ranges_of_libraries_end_at_the_newest_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = runpy.run_path(str(ROOT / ".ci" / "compatibility.py"))["LIBRARIES"]
    makefile = (ROOT / "Makefile").read_text()
    for name in ("vllm", "sglang"):
        version = re.search(rf"{name.upper()}_VERSION := (.*)", makefile)[1]
        tested[name] = ([version], [])
    for library in (MEGATRON, SGLANG, TORCHTITAN, TRANSFORMERS, VLLM):
        package = library.packages[0]
        oldest, newest = tested[package][0][0], tested[package][0][-1]
        *first, last = map(int, newest.split(".")[: len(library.oldest)])
        assert library.below == (*first, last + 1)
        assert f"{oldest}.".startswith(".".join(map(str, library.oldest)) + ".")
        extra = project["optional-dependencies"][package.removesuffix("-core")][-1]
        below = ".".join(map(str, library.below))
        assert extra == f"{package}>={oldest.removesuffix('.0')},<{below}"


def run_code(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


def test_no_broad_except():
    for path in MODULES:
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                assert caught not in ("", "Exception", "BaseException"), path


def test_the_changelog_knows_this_version_and_links_lead_somewhere():
    assert f"## {ultraep.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


# Modules that need a framework which is not installed, or a GPU, cannot be imported everywhere.
CODE = """
import importlib, pkgutil, socket, sys

LOOPBACK = ("127.0.0.1", "::1", "localhost", "")
refused = []

def check(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.bind"):
        address = args[1]
        outside = isinstance(address, tuple) and address[0] not in LOOPBACK
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        outside = args[0] not in (*LOOPBACK, None, socket.gethostname())
    else:
        return
    if outside:
        refused.append((event, args))
        raise PermissionError(f"{event}: {args}")

sys.addaudithook(check)

try:  # the hook works
    socket.create_connection(("192.0.2.1", 80), timeout=1)
except PermissionError:
    refused.clear()
else:
    sys.exit("a connection was not noticed")

import ultraep, ultraep_tools
missing = []
for module in [
    *pkgutil.walk_packages(ultraep.__path__, "ultraep."),
    *pkgutil.walk_packages(ultraep_tools.__path__, "ultraep_tools."),
]:
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ImportError as error:
        missing.append((module.name, str(error)))

import torch
group = ultraep.LocalGroup(2)
def work(comm):
    balancer = ultraep.Balancer(comm, experts=8, slots=1)
    torch.manual_seed(0)
    moe = ultraep.BalancedMoE.swiglu(16, 32, 8, 2, balancer=balancer)
    moe(torch.randn(64, 16, requires_grad=True)).sum().backward()
    assert moe.last_plan.to_host().num_replicas
group.run(work)

from ultraep_tools.__main__ import main
sys.argv = ["ultraep", "plan", sys.argv[1]]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert not refused, refused
names = [name for name, _ in missing]
assert all(".integrations." in n or "_tools." in n or ".metrics" in n for n in names), missing
print("imported", len(sys.modules), "refused", len(refused), "missing", len(names))
"""


def test_no_connection_leaves_this_machine(tmp_path):
    loads = tmp_path / "loads.csv"
    loads.write_text("9,0,1,2\n8,1,0,3\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(loads)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "refused 0" in done.stdout
