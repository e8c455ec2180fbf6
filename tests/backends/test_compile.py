"""Every kernel compiles for every supported GPU, within its registers and shared memory."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compile_kernels import COLUMNS, TARGETS

import ultraep

KERNELS = Path(ultraep.__file__).parent / "backends/triton/kernels"
SCRIPT = Path(__file__).parent / "compile_kernels.py"
SIZES = ("64x256x1", "512x2048x2")
MOVERS = {"expose_values", "gather_rows", "sum_rows", "stream", "pull"}  # between GPUs
PRODUCTS = {"multiply", "weight_gradients"}
ONCE = ("sm_80", "sm_100", "gfx942")  # targets that compile one variant of most kernels
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}  # KiB per program


def launched():
    """Return the names of the kernels that no other kernel calls."""
    trees = [ast.parse(file.read_text()) for file in KERNELS.glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    kernels = {node.name for node in functions if node.decorator_list}
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    called = {call.split(".")[-1] for call in calls}
    handed_on = {name.id for node in nodes if isinstance(node, ast.Call) for name in names_in(node)}
    return kernels - called - handed_on


def names_in(call):
    return [argument for argument in call.args if isinstance(argument, ast.Name)]


@pytest.fixture(
    scope="module", params=[ONCE, pytest.param((), marks=pytest.mark.long)], ids=["most", "all"]
)
def table(request):
    """Return the lines of the script; variants that have not changed are not compiled again."""
    source = str(Path(ultraep.__file__).parents[1])
    paths = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    once = ("--once", ",".join(request.param))
    known = str(request.config.cache.mkdir("kernels"))
    made = subprocess.run(
        [sys.executable, str(SCRIPT), "--sizes", ",".join(SIZES), "--known", known, *once],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    print(made.stdout)
    header, *lines = made.stdout.splitlines()
    assert header.split() == list(COLUMNS)
    return [dict(zip(COLUMNS, line.split(), strict=True)) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(table, target):
    assert {row["kernel"] for row in table if row["target"] == target} == launched()


@pytest.mark.slow
def test_the_planner_compiles_in_all_its_variants(table):
    for target in sorted(TARGETS.keys() - set(ONCE)):
        rows = [r for r in table if r["kernel"] == "search" and r["target"] == target]
        settings = ("LOOSE=True", "LOOSE=False", "ONE_SLOT=True", "ONE_SLOT=False", "SPEEDS=True")
        for setting in settings:
            assert any(setting in row["variant"] for row in rows), setting
        assert {row["warps"] for row in rows} == {"1", "4"}


@pytest.mark.slow
def test_registers_suffice(table):
    """Kernels with the search for a higher threshold, a rare case, may spill a little.

    So may FP8 products with a bias, behind their loop.
    """
    allowed = {"search": 64, "plan_by_time": 64, "multiply": 16}
    for row in table:
        if row["size"] == "64x256x1" and row["target"] == "sm_90":
            assert int(row["spilled"]) <= allowed.get(row["kernel"], 0), row


@pytest.mark.slow
def test_shared_memory_suffices_everywhere(table):
    """Only matrix products may use all shared memory."""
    for row in table:
        most = SHARED[row["target"]] if row["kernel"] in PRODUCTS else 48
        assert int(row["shared"]) <= most * 1024, row


@pytest.mark.slow
def test_products_compile_with_and_without_biases(table):
    for kernel in PRODUCTS:
        variants = [row["variant"] for row in table if row["kernel"] == kernel]
        without = [variant for variant in variants if "biases.0=None" in variant]
        assert 0 < len(without) < len(variants)


@pytest.mark.slow
def test_memory_is_moved_in_wide_pieces(table):
    """Addresses from a table are not known to be aligned; the kernels must hint it."""
    rows = [row for row in table if row["kernel"] in MOVERS]
    assert {row["kernel"] for row in rows} == MOVERS
    for row in rows:
        # Warps of 64 threads leave each thread half as many elements.
        halved = row["target"] == "gfx942" and row["kernel"] == "sum_rows"
        assert row["widest"] == ("8" if halved else "16"), row
