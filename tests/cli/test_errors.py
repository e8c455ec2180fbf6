"""What users get wrong, and what the system refuses: one line, and an exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ultraep
from ultraep import BalanceConfig, ConfigError, LocalGroup, Topology, workload
from ultraep.runtime.connect import connect
from ultraep.tools.cli import app
from ultraep.tools.launch.processes import RankPlace

SOURCE = Path(ultraep.__file__).parent.parent
HUGE = str(10**20)
SIMULATE = ("simulate", "--cluster", "h200-nvl8", "--model", "gpt-oss-20b", "--ep", "8")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the devices of Linux")


def assert_one_line(*arguments, told):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.exception
    assert result.stderr.startswith("ultraep: ")
    assert told in result.stderr


TELLING = """
import signal, ultraep_start
listen = signal.signal
signal.signal = lambda *how: (listen(*how), print(flush=True))[0]
ultraep_start.main()
"""


def start(*arguments, program=("-m", "ultraep_start"), **options):
    return subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture
def loads(tmp_path):
    np.save(tmp_path / "loads.npy", np.arange(8).reshape(2, 4))
    return tmp_path / "loads.npy"


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", ["--ranks", "--slots", "--domain", "--min-tokens", "--max-replicas", "--show"]
)
def test_huge_numbers_of_a_plan(loads, option):
    assert_one_line("plan", loads, option, HUGE, told=HUGE)


@pytest.mark.parametrize(
    "option",
    [
        *("--ep", "--slots", "--tokens", "--pipeline", "--groups", "--microbatches"),
        *("--steps", "--domain", "--interval", "--seed", "--topic-length", "--drift-length"),
    ],
)
def test_huge_numbers_of_a_simulation(option):
    assert_one_line(*SIMULATE, option, HUGE, told="0" * 15)


@pytest.mark.parametrize("name", ["loads.csv", "loads.json"])
def test_loads_too_large_to_count(tmp_path, name):
    text = f"{HUGE},1\n1,1\n" if name.endswith("csv") else f"[[{HUGE}, 1], [1, 1]]"
    (tmp_path / name).write_text(text)
    assert_one_line("plan", tmp_path / name, told=name)


# -- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"1,2\r\n3,4\r\n\r\n5,6\r\n7,8\r\n",
        b"1,2\r3,4\r\r5,6\r7,8\r",
        "1,2\f\n3,4\n\v\n5,6\u2028\n7,8\n".encode(),  # form feeds end no line
        "1,2\n3,4\n\n5,6\n7,8\n".encode("utf-8-sig"),
        "1,2\n3,4\n\n5,6\n7,8\n".encode("utf-16"),
    ],
)
def test_lines_and_encodings_of_all_systems(tmp_path, content):
    path = tmp_path / "loads.csv"
    path.write_bytes(content)
    assert workload.read_loads(path).tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


# -- the library ---------------------------------------------------------------------------------


def test_ragged_homes():
    with pytest.raises(ConfigError, match="homes must be a list of ranks"):
        Topology(ranks=2, experts=4, homes=[0, [1, 1], 0])


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0, -1, 10**20, "60", [1]])
def test_timeouts_are_numbers_of_seconds(seconds):
    for make in (lambda: connect(None, timeout=seconds), lambda: LocalGroup(2, timeout=seconds)):
        with pytest.raises(ConfigError, match="timeout must be a positive number of seconds"):
            make()


def test_settings_too_large_to_count():
    for change in ({"min_tokens_per_replica": 10**20}, {"max_replicas": 10**20}):
        with pytest.raises(ConfigError, match=f"at most {1 << 40}, got {HUGE}"):
            BalanceConfig(**change)
    with pytest.raises(ConfigError, match="tolerance must lie between"):
        BalanceConfig(tolerance=10**400)


@pytest.mark.parametrize(
    ("rank", "size", "told"),
    [
        ("x", "2", "RANK must lie between 0 and 65535 in the environment, got 'x'"),
        ("0", "", "WORLD_SIZE must lie between 1"),
        ("0", HUGE, f"got '{HUGE}'"),
        ("-1", "2", "RANK must lie"),
        ("2", "2", "RANK is 2 in the environment, but WORLD_SIZE 2"),
    ],
)
def test_a_place_that_is_none(monkeypatch, rank, size, told):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=told):
        RankPlace.of_torchrun()
    assert_one_line("demo", told=told)


# -- the system ----------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize(
    "command", [("--help",), ("plan", "{loads}"), ("plan", "{loads}", "--json")]
)
def test_a_full_standard_output_is_one_line(loads, command):
    words = [word.format(loads=loads) for word in command]
    with open("/dev/full", "wb") as full:
        process = start(*words, stdout=full)
        errors = process.communicate(timeout=120)[1]
    assert (process.returncode, errors.count("\n")) == (2, 1), errors
    assert "No space left on device" in errors


@linux
def test_an_endless_input_is_not_read(tmp_path):
    for name in ("loads.npy", "loads.npz", "loads.csv", "loads.json"):
        (tmp_path / name).symlink_to("/dev/zero")
        assert_one_line("plan", tmp_path / name, told=f"{name}: not a regular file")


@pytest.mark.parametrize("after", [0.05, 0.3, 1.0])
def test_ctrl_c_while_modules_load_is_one_line(tmp_path, after):
    """From when the command itself listens, which it tells; `env` imports torch."""
    process = start("env", stdout=subprocess.PIPE, program=("-c", TELLING))
    process.stdout.readline()
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=120)[1]
    assert "Traceback" not in errors or "ultraep" not in errors, errors
    assert process.returncode in (0, 130, -signal.SIGINT)


IGNORING = """
import signal, time, weakref
from ultraep_start import _Interrupts
with _Interrupts():
    gone = set()
    watched = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGINT))
    del gone
    time.sleep(60)
"""


def test_ctrl_c_in_a_callback_whose_errors_python_ignores_interrupts():
    process = start(program=("-c", IGNORING))
    assert process.communicate(timeout=60)[1] == "ultraep: interrupted\n"
    assert process.returncode == 130
