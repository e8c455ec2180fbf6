"""User errors and errors of the system: one line, an exit code, and no output file."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from traces import plan_for, record

from ultraep import workload
from ultraep_tools.cli import advise, demo
from ultraep_tools.cli import plan as plan_command

from .commands import assert_one_line, invoke, start

HUGE = str(10**20)
ADVISE = "advise --cluster h200-nvl8 --model gpt-oss-20b --ep 8"
TRAIN = f"{ADVISE} --steps 1 --microbatches 3"
PREFILL = f"{ADVISE} --prefill"
RANDOM = "inspect --random mixtral"
START = ("-m", "ultraep_tools")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs the devices of Linux")

WRONG = {
    # the command line
    "plan": "missing argument 'FILE' (see ultraep plan --help)",
    "plan loads.npy --slot 3": "no such option: --slot",
    "--nonsense": "no such option: --nonsense",
    "plam": "no such command 'plam'",
    "env --import none.py": "it precedes the command: ultraep --import FILE COMMAND",
    "--import none.py env": "--import none.py: no such file",
    "--import raises.py env": "--import raises.py: ZeroDivisionError: division by zero",
    "--import silent.py env": "--import silent.py: registers no policy; decorate a function with",
    "--import no_such_module env": "ModuleNotFoundError: No module named 'no_such_module'",
    # plan: files
    "plan none.npy": "none.npy: no such file",
    "plan negative.npy": "microbatch 0: loads must not be negative, got -1 for source rank 0, "
    "expert 1",
    "plan uneven.npy": "6 experts do not divide",
    "plan run": "plan a trace with `ultraep trace replay`",
    # plan: options
    "plan loads.npy --policy none,magic": "unknown policy 'magic'; choose from none, ultraep",
    "plan loads.npy --policy ,": "--policy needs at least one name",
    "plan loads.npy --backend abacus": "unknown backend 'abacus'; choose from cpu, reference",
    "plan loads.npy --history 0": "--history must be at least 1, got 0",
    **{
        f"{command} {HUGE}": "0" * 15
        for command in (
            *("plan loads.npy --slots", "plan loads.npy --domain", f"{ADVISE} --ep"),
            *(f"{ADVISE} --tokens", f"{ADVISE} --seed"),
        )
    },
    # advise
    f"{TRAIN} --model qwen3-235b": "per device do not fit into the 141 GB",
    f"{TRAIN} --policy magic": "unknown policy 'magic'",
    f"{TRAIN} --prefill": "not training; remove --microbatches and --steps",
    f"{TRAIN} --trace uneven.npy": "loads of 6 experts",
    f"{TRAIN} --trace loads.npy --imbalance 2": "remove --imbalance",
    **{
        f"{PREFILL} {option}": f"remove {option.split()[0]}"
        for option in (
            *("--pipeline 1", "--groups 1", "--microbatches 1", "--steps 1", "--no-recompute"),
        )
    },
    # trace
    "trace export run --npz run.zip": "--npz needs a name that ends in .npz, got run.zip",
    "trace replay run --slots two": "--slots must be numbers like 1,2 or 0-3, got 'two'",
    "trace replay empty": "holds no trace",
    "trace export demo --npz x.npz": "holds 2 traces; pass one of them: demo/none/trace, "
    "demo/ultraep/trace",
    # view
    "view run --export no/such/a.html": "cannot be written",
    # demo
    "demo --seed -1": "--seed must not be negative, got -1",
    "demo --policy none,eplb": "policy 'eplb' plans offline only, for comparison",
    "demo --out /dev/null/folder": "cannot be written to",
    # inspect
    "inspect": "pass the directory of a model or --random FAMILY",
    "inspect Qwen/Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B: not a directory",
    f"{RANDOM} --ep eight": "--ep must be numbers like 1,2 or 0-3, got 'eight'",
    f"{RANDOM} --layers 3-1": "--layers 3-1: a range must ascend",
}
NEEDS = {"inspect": "transformers", "view": "plotly"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with the files that the commands name."""
    folder = tmp_path_factory.mktemp("errors")
    arrays = {
        "loads": np.arange(8 * 32).reshape(8, 32),
        "negative": [[3, -1], [0, 2]],
        "uneven": np.ones((4, 6), int),
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", np.asarray(values))
    (folder / "raises.py").write_text("1 / 0\n")
    (folder / "silent.py").write_text("one = 1\n")
    for name in ("run", "again", "demo/none/trace", "demo/ultraep/trace"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        record(folder / name, [plan_for(0)])
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("line", WRONG)
def test_a_user_error_is_one_line_before_any_work(line, files, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the work began")

    if line.split()[0] in NEEDS:
        pytest.importorskip(NEEDS[line.split()[0]])
    monkeypatch.chdir(files)
    for module, name in ((advise, "make_advice"), (demo, "run")):
        monkeypatch.setattr(module, name, refuse)
    before = sorted(files.rglob("*"))
    assert_one_line(invoke(*line.split()), WRONG[line])
    assert sorted(files.rglob("*")) == before


def test_a_newline_in_a_file_name_stays_on_the_line(tmp_path):
    assert_one_line(invoke("plan", tmp_path / "two\nlines.npy"), "two lines.npy: no such file")


def test_no_command_prints_the_help():
    for words in ((), ("trace",)):
        result = invoke(*words)
        assert "Usage: ultraep" in result.stdout
        assert result.stderr == ""


@pytest.mark.parametrize(
    "content",
    [
        b"1,2\r\n3,4\r\n\r\n5,6\r\n7,8\r\n",
        b"1,2\r3,4\r\r5,6\r7,8\r",
        "1,2\f\n3,4\n\v\n5,6\u2028\n7,8\n".encode(),  # form feeds do not end a line
        *("1,2\n3,4\n\n5,6\n7,8\n".encode(encoding) for encoding in ("utf-8-sig", "utf-16")),
    ],
)
def test_lines_and_encodings_of_all_systems(tmp_path, content):
    path = tmp_path / "loads.csv"
    path.write_bytes(content)
    assert workload.read_loads(path).tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        ("x", "2", "the environment has RANK='x' WORLD_SIZE='2', which is no rank"),
        ("0", "", "WORLD_SIZE='', which is no rank"),
        ("0", HUGE, f"WORLD_SIZE='{HUGE[:20]}', which is no rank"),
        ("-1", "2", "RANK='-1'"),
        ("2", "2", "RANK='2' WORLD_SIZE='2', which is no rank"),
    ],
)
def test_an_invalid_rank_of_torchrun(monkeypatch, rank, size, message):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    assert_one_line(invoke("check"), message)


def failing_plan(files, monkeypatch, error):
    def read_loads(_):
        raise error

    monkeypatch.setattr(plan_command, "read_loads", read_loads)
    return invoke("plan", files / "loads.npy")


def test_ctrl_c_is_one_line(files, monkeypatch):
    result = failing_plan(files, monkeypatch, KeyboardInterrupt)
    assert (result.exit_code, result.output) == (130, "ultraep: interrupted\n")


@linux
@pytest.mark.parametrize(
    "words", [["--help"], ["plan", "loads.npy"], ["plan", "loads.npy", "--json"]]
)
def test_a_full_standard_output_is_one_line(files, words):
    with open("/dev/full", "wb") as full:
        process = start(*words, program=START, stdout=full, cwd=files)
        errors = process.communicate(timeout=300)[1]
    assert (process.returncode, errors.count("\n")) == (2, 1), errors
    assert "No space left on device" in errors


@linux
def test_an_endless_input_is_not_read(tmp_path):
    for name in ("loads.npy", "loads.npz", "loads.csv"):
        (tmp_path / name).symlink_to("/dev/zero")
        assert_one_line(invoke("plan", tmp_path / name), f"{name}: not a regular file")


ANNOUNCING = """
import signal, ultraep_tools.__main__ as start
install = signal.signal
signal.signal = lambda *handler: (install(*handler), print(flush=True))[0]
start.main()
"""


@pytest.mark.parametrize("delay", [0.05, 0.5])
def test_ctrl_c_while_modules_load_is_one_line(delay):
    """The command prints a line when its handler is installed; `env` imports torch."""
    process = start("env", stdout=subprocess.PIPE, program=("-c", ANNOUNCING))
    process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=300)[1]
    assert "Traceback" not in errors or "ultraep" not in errors, errors
    assert process.returncode in (0, 130, -signal.SIGINT)
