"""Examples in docstrings run as written; tests/backends/test_kernel_examples.py runs kernels."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import ultraep

PACKAGE = Path(ultraep.__file__).parent
MODULES = [
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in path.read_text() and "kernels" not in path.parts
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    optional = ".integrations." in name or ".triton." in name
    module = pytest.importorskip(name, exc_type=ImportError) if optional else import_module(name)
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted > 0
