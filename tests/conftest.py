"""Settings for all tests: the same examples every time, no test limited by a slow machine.

Without a GPU, the kernels for it run through Triton's interpreter.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is first imported
# Rates that are measured differ from run to run, and plans with them. These are fixed, and replicas
# cost next to nothing: tests plan with the default objective and get the same plans everywhere.
os.environ["ULTRAEP_RATES"] = "row=1000000,copy=1,each=0,layer=0"

pytest_plugins = ["inspect_models"]  # fixtures
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import quick_interpreter  # noqa: E402  where kernels are interpreted is known only now

from ultraep.backends import wait_until_compiled  # noqa: E402
from ultraep.policies import BUILT_IN, get_policy  # noqa: E402

quick_interpreter.install()
wait_until_compiled()  # tests and the processes that they start find the planner on disk
for policy in BUILT_IN:
    get_policy(policy)  # registered now, and not while a test has put a registry of its own there
# Of the files that take longest most have few tests, and `--dist loadfile` would keep them last.
LONGEST = (
    "backends/test_compile.py",
    "test_benchmarks.py",
    "integrations/test_transformers_equality.py",
    "backends/test_triton.py",
    "backends/test_stream.py",
    "backends/test_quantised.py",
    "demo/test_run.py",
    "integrations/test_transformers_checkpoints.py",
    "runtime/test_mapped.py",
    "runtime/test_life_cycles.py",
    "test_examples.py",
    "test_pretrain.py",
)
for profile, examples in (("repeatable", 300), ("thorough", 3000)):
    settings.register_profile(
        profile,
        derandomize=True,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("repeatable")  # --hypothesis-profile thorough: make test-all


def pytest_collection_modifyitems(items):
    """Begin with the longest, so that no process has much left when the other is done."""
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def one_thread():
    """For tests whose ranks are threads: those of torch would only get in their way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
