"""The fuzzer finds planted defects, and nothing in a short run; `make fuzz` runs it for longer."""

import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import warm

import ultraep
from fuzz import guided, plans
from fuzz.guided import Coverage, Target, outcome
from ultraep import ConfigError

HERE = str(Path(__file__).parent)


def read_magic(content):
    """Fail for one input out of 2**32; each letter is a line of its own."""
    for place, letter in enumerate(b"FUZZ"):
        if content[place] != letter:
            return place and LINES[place - 1]()
    raise KeyError("planted")


LINES = [
    lambda: "F",
    lambda: "FU",
    lambda: "FUZ",
]


def other_byte(content, rng):
    at = rng.randrange(len(content))
    return content[:at] + rng.randbytes(1) + content[at + 1 :]


def test_guidance_finds_a_defect_behind_four_branches():
    target, coverage = Target("magic", [b"...."], read_magic, other_byte), Coverage(HERE)
    found = next(filter(None, (target.step(n, 7, coverage) for n in range(200_000))))
    assert found.content == b"FUZZ"
    assert "planted" in found.problem
    assert len(target.kept) >= 4


def test_a_run_is_a_function_of_its_seed():
    def inputs(seed):
        target, coverage, contents = Target("any", [b"12,34\n5,6"], len), Coverage(HERE), []
        target.read = contents.append
        for number in range(50):
            target.step(number, seed, coverage)
        return contents

    assert inputs(3) == inputs(3) != inputs(4)


def fail(error):
    raise error


def forever():
    try:
        while True:
            time.sleep(0.01)
    except Exception:  # noqa: BLE001  as a reader might
        raise ConfigError("a hang must not look like a refusal") from None


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda: None, "read"),
        (lambda: fail(ConfigError("wrong")), "refused"),
        (lambda: fail(ConfigError("wrong\nand more")), "not one line"),
        (lambda: fail(ConfigError("Unable to allocate 9 GiB")), "too much memory"),
        (lambda: fail(ValueError("of NumPy")), "ValueError: of NumPy"),
        (forever, "more than 1 s"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGALRM")
def test_outcomes(monkeypatch, read, expected):
    monkeypatch.setattr(guided, "SECONDS", 1)
    monkeypatch.setattr(guided, "ON_A_BUSY_MACHINE", 1)
    assert expected in outcome(read)


def test_a_plan_of_another_backend_that_differs_is_found(monkeypatch):
    plan = ultraep.plan

    def wrong(loads, topology, config, **options):
        if options.get("backend") == "reference":
            loads = np.roll(loads, 1)
        return plan(loads, topology, config, **options)

    monkeypatch.setattr(ultraep, "plan", wrong)
    with pytest.raises(AssertionError):
        check_some()


def check_some():
    for number in range(0, 1000, plans.AGAIN):
        plans.check_plan(1, number, plans.Counts())


def test_a_plan_below_the_lower_bound_is_found(monkeypatch):
    monkeypatch.setattr(plans, "_bound", lambda *_: 2**40)
    with pytest.raises(AssertionError, match="below the lower bound"):
        check_some()


def fuzz(tmp_path, *words):
    """Run the fuzzer in a process of its own: it limits its memory."""
    environment = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    program = warm.Program(run_fuzz, [*words, "--log", str(tmp_path / "log")], **environment)
    done = program.finish(timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "log").read_text()
    assert log.count("findings: 0") == 2, log
    return log


def run_fuzz(words):
    sys.argv = ["fuzz", *words]
    sys.path.insert(0, str(Path(HERE).parent))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # of ranks
    from fuzz.__main__ import main

    main()


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")


@needs_linux
def test_a_short_run_finds_nothing(tmp_path):
    pytest.importorskip("transformers")
    log = fuzz(tmp_path, "--files", "60", "--plans", "300", "--seed", "5")
    assert "files: 60 in" in log
    assert "plans: 300 in" in log


@needs_linux
@pytest.mark.long
def test_a_minute_finds_nothing(tmp_path):
    pytest.importorskip("transformers")
    fuzz(tmp_path, "--minutes", "1", "--seed", str(random.Random(32).randrange(1000)))
