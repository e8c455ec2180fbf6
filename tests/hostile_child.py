"""Pass damaged files to the commands, in one process with limited memory; print the outcomes.

    python hostile_child.py FOLDER FIRST LAST

Prints a line of JSON per file: number, file, outcome. The number is the seed of the damage; -1
marks a valid file, 0 a file built to exhaust memory.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
from damage import damaged
from inspect_models import TEXTS, save_model, save_tokenizer
from traces import plan_for, record
from typer.testing import CliRunner

from ultraep import UltraEPError, read_trace
from ultraep.workload.files import read_routing
from ultraep_tools.cli.commands import app
from ultraep_tools.demo.result import DemoResult
from ultraep_tools.inspect.texts import hashed_words, texts_of, tokenizer_of, windows_of
from ultraep_tools.sim.cluster import load_cluster
from ultraep_tools.view.catalogue import Catalogue
from ultraep_tools.view.table import numbers_of, overview, stages_of

SECONDS = 10  # of CPU time for one file, after which it counts as a hang
GIGABYTE = 1 << 30  # of memory, for all files together
DATA = Path(load_cluster.__code__.co_filename).parent / "data"
PIECES = ("rank-00000/000000.npz", "rank-00001/000000.npz")
ADVISE = ("advise", "--ep", 8, "--steps", 1, "--microbatches", 1)
ADVISE += ("--cluster", "h200-nvl8", "--model", "gpt-oss-20b")
INSPECT = ("--tokens", 16, "--window", 16, "--layers", 0, "--ep", 2)


class TooSlow(BaseException):
    """A file takes too long. Not an `Exception`, so that no reader takes it for damage."""


def too_slow(*_):
    raise TooSlow(f"more than {SECONDS} s")


def limit_memory():
    """Allow one gigabyte more than this process uses now."""
    with open("/proc/self/status", encoding="ascii") as status:
        taken = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + GIGABYTE, resource.RLIM_INFINITY))


def write_all(folder):
    from cli.test_demo import RESULT

    loads = np.random.default_rng(0).integers(0, 99, (3, 2, 4))
    np.save(folder / "loads.npy", loads)
    np.save(folder / "columns.npy", np.asfortranarray(loads[0]))
    np.savez(folder / "loads.npz", *loads)
    np.savez_compressed(folder / "packed.npz", *loads)
    lines = ["\n".join(",".join(map(str, row)) for row in matrix) for matrix in loads.tolist()]
    (folder / "loads.csv").write_text("\n\n".join(lines) + "\n")
    ids = np.random.default_rng(1).integers(0, 4, (40, 2, 2)).astype(np.uint8)
    np.savez_compressed(folder / "routing.npz", a_ids=ids, a_seq_lens=np.array([40]))
    run = record(folder / "run", [plan_for(seed) for seed in range(6)], layers=2, note="here")
    read_trace(run).save(folder / "trace.npz")
    for file, name in (("clusters", "h200-nvl8"), ("models", "gpt-oss-20b")):
        text = (DATA / f"{file}.toml").read_text()
        (folder / f"{file}.toml").write_text(re.search(rf"\[{name}\][^[]*", text)[0])
    (folder / "prose.txt").write_text(TEXTS["letters"])
    (folder / "demo").mkdir()
    RESULT.save(folder / "demo")
    save_model("qwen3_moe", folder / "model")
    save_tokenizer(folder / "model")


def commands(folder, out):
    """Return the command lines, or the function, that read each file."""
    inspect = ("inspect", folder / "model", "--text", folder / "prose.txt", *INSPECT)
    inspect += ("--out", out / "inspected")
    export = ("--npz", out / "a.npz")

    def of_trace(name):
        trace = folder / name
        verbs = [("info", trace), ("replay", trace), ("export", trace, *export, "--force")]
        return [*(("trace", *words) for words in verbs), lambda _: draw(trace)]

    shard = sorted((folder / "model").glob("*.safetensors"))[1].name
    plans = ("loads.npy", "columns.npy", "loads.npz", "packed.npz", "loads.csv")
    return {
        **{name: [("plan", folder / name)] for name in plans},
        "routing.npz": read_routing,
        "trace.npz": of_trace("trace.npz"),
        **{f"run/{name}": of_trace("run") for name in ("header.json", *PIECES)},
        "clusters.toml": [(*ADVISE, "--cluster", folder / "clusters.toml")],
        "models.toml": [(*ADVISE, "--model", folder / "models.toml")],
        "prose.txt": read_words,
        "demo/result.json": lambda path: DemoResult.load(path.parent),
        "model/config.json": [inspect],
        f"model/{shard}": [inspect],
        "model/model.safetensors.index.json": [inspect],
        "model/tokenizer.json": lambda path: tokenizer_of(path.parent)("the quick brown fox"),
    }


def draw(path):
    catalogue = Catalogue([path])
    trace = catalogue.trace(catalogue.items[0].name)
    drawn = [overview(trace.table)]
    for key in map(trace.table.key, range(len(trace.table))):
        drawn += [numbers_of(trace.record(key)), stages_of(trace.record(key))]
    json.dumps(drawn, allow_nan=False)


def read_words(path):
    windows_of(texts_of([path]), hashed_words(4096), tokens=16, window=16, sequence=16)


def outcome(read, path):
    """Return "fine" or "refused"; anything else describes a failure."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of CPU time: the machine may be busy
    try:
        readers = read if isinstance(read, list) else [read]
        outcomes = [
            outcome_of_function(reader, path) if callable(reader) else outcome_of_command(reader)
            for reader in readers
        ]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return max(outcomes, key=["fine", "refused", *outcomes].index)


def outcome_of_function(read, path):
    try:
        read(path)
    except UltraEPError as error:
        return _refusal(f"ultraep: {error}\n")
    except (Exception, TooSlow):  # noqa: BLE001  any other exception is a failure
        return traceback.format_exc()
    return "fine"


def outcome_of_command(command):
    result = CliRunner().invoke(app, list(map(str, command)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception))
    replays_differently = command[:2] == ("trace", "replay") and result.exit_code == 1
    helped = not result.stderr and "Usage: " in result.stdout  # a command without its verb
    fine = result.exit_code == 0 or replays_differently or helped
    return "fine" if fine else _refusal(result.stderr)


def _refusal(words):
    """Return "refused" for a message of one line; `inspect` may print its progress before."""
    *before, last = words.splitlines()
    progress = all(line.startswith(("reading", "loading")) for line in before)
    return "refused" if last.startswith("ultraep: ") and progress else words


def huge(path, _):
    path.write_bytes(b"")
    os.truncate(path, 5 * GIGABYTE)


def text(content):
    return lambda path, _: path.write_text(content)


def header(**changes):
    return lambda path, _: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BOMBS = [
    ("loads.csv", text("1\n" * 4_000_000)),
    *((name, huge) for name in ("loads.npy", "packed.npz", "clusters.toml")),
    *((f"model/{name}.json", huge) for name in ("config", "tokenizer", "model.safetensors.index")),
    ("demo/result.json", huge),
    ("run/header.json", huge),
    ("run/header.json", header(ranks=1 << 16, experts=1 << 20, domain=1 << 16)),
    ("run/header.json", header(stages=[str(number) for number in range(200_000)])),
    ("run/header.json", text("[" * (1 << 20))),
]


def main(root, first, last):
    """Damage, read and restore one file after the other."""
    folder, out = root / "files", root / "out"
    folder.mkdir()
    out.mkdir()
    write_all(folder)
    read_by = commands(folder, out)
    for name, read in read_by.items():  # imports and compiles everything before the limit
        report(-1, name, outcome(read, folder / name))
    limit_memory()
    work = [(0, name, damage) for name, damage in BOMBS]
    slow = [n for n, read in read_by.items() if isinstance(read, list) and read[0][0] != "plan"]
    names = slow + 2 * sorted(read_by.keys() - set(slow))
    work += [(number, names[number % len(names)], mutate) for number in range(first, last)]
    whole = folder.rename(root / "whole")
    for number, name, damage in work:
        shutil.copytree(whole, folder)
        path = folder / name
        damage(path, random.Random(number))
        before = times_of_files(folder)
        words = outcome(read_by[name], path)
        before[path] = times_of_files(folder)[path]  # a folder may be claimed again
        report(number, name, words if times_of_files(folder) == before else "changed files")
        shutil.rmtree(folder)


def times_of_files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def mutate(path, rng):
    path.write_bytes(damaged(path.read_bytes(), rng))


def report(number, name, words):
    print(json.dumps([number, name, words]), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, too_slow)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
