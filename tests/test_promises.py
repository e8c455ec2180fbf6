"""Promises to users and newcomers that no single module can keep alone."""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import ultraep

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "ultraep"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Every layer may import from itself and from the layers above it in this list.
LAYERS = [
    ["errors", "version", "arrays", "modes"],
    ["config", "comm", "bundle", "inputs", "outputs", "activations", "routing", "hosts", "recompute"],
    ["products", "formats", "quantised"],
    ["topology"],
    ["backends"],
    ["loads", "policies"],
    ["rules"],
    ["plan", "workload"],
    ["hops"],
    ["trace", "report"],
    ["claim"],
    ["plane"],
    ["reroute", "replicate", "grad_reduce"],
    ["parallel"],
    ["dispatch"],
    ["combine", "loan", "quantisable"],
    ["experts"],
    ["runtime"],
    ["layer"],
    ["full_state"],
    ["metrics"],
    ["sim"],
    ["tiny"],
    ["demo", "inspect", "view"],
    ["integrations"],
    ["serving"],
    ["__init__"],
    ["cli", "__main__"],
]
STORY = (
    "activations",
    "bundle",
    "comm",
    "formats",
    "loan",
    "modes",
    "plane",
    "products",
    "quantisable",
    "quantised",
    "recompute",
    "routing",
    "reroute",
    "replicate",
    "dispatch",
    "combine",
    "experts",
    "grad_reduce",
)
ONLY_IN = {
    "httpx": ["serving/endpoint.py"],
    "matplotlib": ["sim/plots.py"],
    "plotly": ["report/page.py", "sim/plots.py"],
    "numba": ["backends/cpu"],
    "scipy": [],  # for tests and benchmarks only
    "typer": ["cli"],
    "rich": ["cli"],
    "torch": [
        "backends/triton",
        "cli/env.py",
        "demo",
        "full_state.py",
        "inspect",
        "integrations",
        "layer.py",
        "metrics",
        "parallel",
        "runtime",
        "serving",
        "tiny",
        *(f"{name}.py" for name in STORY),
    ],
    "triton": ["backends/triton"],
    "torch.distributed": ["demo", "integrations", "parallel", "runtime", "serving", "tiny"],
    "megatron": ["integrations/megatron"],
    "safetensors": ["inspect", "integrations/transformers"],
    "spmd_types": ["integrations/torchtitan"],
    "starlette": ["view"],
    "torchtitan": ["integrations/torchtitan"],
    "transformers": ["inspect", "integrations/transformers"],
    "uvicorn": ["view"],
    "vllm": ["integrations/vllm"],
    "prometheus_client": ["integrations/vllm", "metrics/prometheus.py"],
    "opentelemetry": ["metrics/telemetry.py"],
}


NAMELESS = ("Of ", "The same")  # beginnings of a docstring that name no noun


def layer_of(name: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if name in names)


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(statement)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_public_names_are_frozen():
    assert sorted(ultraep.__all__) == [
        "BackendUnavailable",
        "BalanceConfig",
        "BalancedMoE",
        "Balancer",
        "CommunicationError",
        "ConfigError",
        "ControlPlane",
        "DeviceShare",
        "Experts",
        "ExpertsFrom",
        "FileError",
        "LoadError",
        "LocalGroup",
        "LocalPeers",
        "NothingToBalance",
        "Plan",
        "PlanError",
        "PlanMismatch",
        "Problem",
        "Rates",
        "Recorder",
        "Router",
        "Routing",
        "SlotError",
        "Topology",
        "UltraEPError",
        "__version__",
        "backend_names",
        "count_loads",
        "gather_experts",
        "plan",
        "policy_names",
        "read_trace",
        "register_policy",
        "serve",
        "workload",
    ]
    assert all(hasattr(ultraep, name) for name in ultraep.__all__)


def test_every_error_is_in_the_tree():
    errors = [e for e in vars(ultraep).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(error, (ultraep.UltraEPError, UserWarning)) for error in errors)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        if top == "ultraep":
            target = rest.split(".")[0] or "__init__"
            known = {name for names in LAYERS for name in names}
            target = target if target in known else "__init__"
            assert layer_of(target) <= layer_of(own), f"{path.name} imports {name}"
        where = str(path.relative_to(PACKAGE))
        for package, places in ONLY_IN.items():
            if name == package or name.startswith(f"{package}."):
                assert any(where.startswith(place) for place in places), f"{where}: {name}"


def test_the_package_imports_without_optional_packages():
    code = """
import sys
for name in ("matplotlib", "numba", "plotly", "scipy", "torch", "triton", "typer", "rich"):
    sys.modules[name] = None
import numpy as np, ultraep
loads = np.array([[9, 0], [9, 0]])
plan = ultraep.plan(loads, ultraep.Topology(ranks=2, experts=2), backend="reference")
plan.check(loads)
assert plan.imbalance == 1.0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_importing_is_light():
    code = """
import sys, ultraep
heavy = {"matplotlib", "numba", "plotly", "scipy", "torch", "triton", "typer", "rich"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_explain_themselves_and_stay_short(path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), "no module docstring"
    assert len(source.splitlines()) <= 400


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_docstrings_begin_with_what_a_thing_is(path):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        told = (isinstance(node, documented) and ast.get_docstring(node)) or ""
        assert not told.startswith(NAMELESS), told


def test_no_two_classes_have_one_name():
    found = [
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, count in Counter(found).items() if count > 1] == []


def test_no_broad_except():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else ""
                assert caught not in ("", "Exception", "BaseException"), path


def test_the_changelog_knows_this_version():
    assert f"## {ultraep.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_links_in_the_docs_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
