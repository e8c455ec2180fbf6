"""Settings of all tests: deterministic examples, no deadlines.

Without a GPU, kernels run in Triton's interpreter.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is first imported
# Rates that are measured differ from run to run, and plans with them. These are fixed, and replicas
# cost next to nothing: tests plan with the default objective and get the same plans everywhere.
os.environ["ULTRAEP_RATES"] = "row=1000000,copy=1,each=0,layer=0"

# Shells start background jobs with SIGINT ignored, and child processes inherit that. Some tests
# send the signal to programs, which must see it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if "ULTRAEP_FLIGHT" not in os.environ:  # many tests end ranks with errors
    os.environ["ULTRAEP_FLIGHT"] = tempfile.mkdtemp(prefix="ultraep-tests-flight-")
    atexit.register(shutil.rmtree, os.environ["ULTRAEP_FLIGHT"], ignore_errors=True)

pytest_plugins = ["inspect_models"]  # fixtures
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import cases  # noqa: E402, F401  registers a policy
import quick_interpreter  # noqa: E402  where kernels are interpreted is known only now

from ultraep.backends import select  # noqa: E402
from ultraep.policies import get_policy, policy_names  # noqa: E402

quick_interpreter.install()
select()  # so that child processes load the planner from disk
for policy in policy_names():
    get_policy(policy)  # before tests replace the registry
# `--dist loadfile` starts files with many tests first; the slowest files have few.
LONGEST = (
    "soak/test_soak.py",
    "backends/test_compile.py",
    "test_benchmarks.py",
    "integrations/test_transformers_equality.py",
    "demo/test_run.py",
    "runtime/test_life_cycles.py",
    "story/test_torch_compile.py",
    "backends/test_triton.py",
    "backends/test_stream.py",
    "view/test_page.py",
    "runtime/test_mapped.py",
    "integrations/test_transformers_checkpoints.py",
    "runtime/test_faults.py",
    "test_examples.py",
    "test_pretrain.py",
)
for profile, examples in (("repeatable", 100), ("thorough", 3000)):
    settings.register_profile(
        profile,
        derandomize=True,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("repeatable")  # --hypothesis-profile thorough: make test-all


def pytest_collection_modifyitems(items):
    """Start with the slowest files, so that all workers finish together; skip tests of GPUs."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    places = {ROOT / "tests" / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture
def one_thread():
    """Use one torch thread: the ranks of these tests are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
