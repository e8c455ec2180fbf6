"""Mutated files through the commands, in one process with little memory; prints what each came to.

    python hostile_child.py FOLDER FIRST LAST

Every file has a number, the seed of its damage; -1 is a sound file, 0 a bomb. For each there is a
line of JSON: number, file, outcome.
"""

import json
import os
import random
import re
import resource
import signal
import struct
import sys
import traceback
import zipfile
import zlib
from pathlib import Path

import numpy as np
from damage import damaged
from inspect_models import TEXTS, save_model, save_tokenizer
from test_damaged_files import DATA, write_loads
from typer.testing import CliRunner

from ultraep import UltraEPError
from ultraep.tools.cli import app
from ultraep.tools.demo.result import DemoResult
from ultraep.tools.inspect.checkpoint import weight_files
from ultraep.tools.inspect.run import claim_folder
from ultraep.tools.inspect.texts import excerpts, hashed_words, texts_of, tokenizer_of
from ultraep.tools.serving.load import read_arrivals
from ultraep.tools.sim.serving import load_requests

GIGABYTE = 1 << 30
SECONDS = 10
SIMULATE = ("simulate", "--ep", 8, "--steps", 1, "--microbatches", 1, "--policy", "none")
SIMULATE += ("--processes", 1)
SMALL = ("--cluster", "h200-nvl8"), ("--model", "gpt-oss-20b")
INSPECT = ("--tokens", 16, "--window", 16, "--layers", 0, "--ep", 2, "--policy", "none")
INSPECT += ("--slots", 1, "--no-report")


def write_all(folder):
    """Write sound files of every kind that commands read, but for traces."""
    from cli.test_demo import RESULT

    write_loads(folder)
    for kind, name in (("clusters", "h200-nvl8"), ("models", "gpt-oss-20b"), ("requests", "stem")):
        text = (DATA / f"{kind}.toml").read_text()
        (folder / f"{kind}.toml").write_text(re.search(rf"\[{name}\][^[]*", text)[0])
    (folder / "arrivals.txt").write_text("# second, tokens\n0.00, 120\n0.31, 64\n1.5\n")
    (folder / "prose.txt").write_text(TEXTS["letters"])
    (folder / "demo").mkdir()
    RESULT.save(folder / "demo")
    claim_folder(folder / "out").close()
    save_model("qwen3_moe", folder / "model")
    save_tokenizer(folder / "model")


def commands(folder):
    """Return the command line, or the function, that reads each file."""
    inspect = ("inspect", folder / "model", "--text", folder / "prose.txt", *INSPECT)
    inspect += ("--out", folder / "inspected")
    shard = sorted((folder / "model").glob("*.safetensors"))[1].name
    plans = ("loads.npy", "columns.npy", "loads.npz", "packed.npz", "loads.csv", "loads.json")
    return {
        **{name: ("plan", folder / name) for name in plans},
        "routing.npz": ("plan", folder / "routing.npz", "--ranks", 2, "--window", 8),
        "clusters.toml": (*SIMULATE, "--cluster", folder / "clusters.toml", *SMALL[1]),
        "models.toml": (*SIMULATE, *SMALL[0], "--model", folder / "models.toml"),
        "requests.toml": lambda path: load_requests(f"{path}"),
        "arrivals.txt": read_arrivals,
        "prose.txt": read_words,
        "demo/result.json": lambda path: DemoResult.load(path.parent),
        "out/.ultraep-inspection": lambda path: claim_folder(path.parent).close(),
        "model/config.json": inspect,
        f"model/{shard}": inspect,
        "model/model.safetensors.index.json": lambda path: weight_files(path.parent),
        "model/tokenizer.json": lambda path: tokenizer_of(path.parent)("the quick brown fox"),
    }


def read_words(path):
    excerpts(texts_of([path]), hashed_words(4096), tokens=16, window=16, sequence=16)


def outcome(command, path):
    """Return "fine", or "refused"; anything else is a failure, in words."""
    signal.alarm(SECONDS)
    try:
        if callable(command):
            command(path)
            return "fine"
        result = CliRunner().invoke(app, list(map(str, command)))
    except UltraEPError as error:
        return _refusal(f"ultraep: {error}\n")
    except Exception:  # noqa: BLE001  whatever it is, it is a failure to report
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception))
    return "fine" if result.exit_code == 0 else _refusal(result.stderr)


def _refusal(words):
    """One line; `ultraep inspect` may have printed its progress before."""
    *before, last = words.splitlines()
    wanted = last.startswith("ultraep: ") and all(line.startswith("reading") for line in before)
    no_memory = re.search("out of memory|MemoryError|Unable to allocate|can't allocate", last)
    return "refused" if wanted and not no_memory else words


# -- bombs ---------------------------------------------------------------------------------------


def bomb(path, member, shape, dtype):
    """A small archive with an array of zeros of many gigabytes, which is really there."""
    header = np.lib.format.header_data_from_array_1_0(np.zeros(0, dtype)) | {"shape": shape}
    text = f"{header}\n".encode()
    content = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text
    size = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
    packer, step = zlib.compressobj(9, zlib.DEFLATED, -15), 1 << 24
    packed = packer.compress(content) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(step)) + packer.flush(zlib.Z_FULL_FLUSH)
    packed += block * (size // step) + packer.flush(zlib.Z_FINISH)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, packed)
    raw = bytearray(path.read_bytes())
    for mark, kind, sizes in ((b"PK\x03\x04", 8, 22), (b"PK\x01\x02", 10, 24)):
        place = raw.rindex(mark)
        raw[place + kind : place + kind + 2] = struct.pack("<H", zipfile.ZIP_DEFLATED)
        raw[place + sizes : place + sizes + 4] = struct.pack("<I", len(content) + size)
    path.write_bytes(raw)


def huge(path, _):
    """Five gigabytes without a byte on the disk."""
    path.write_bytes(b"")
    os.truncate(path, 5 * GIGABYTE)


BOMBS = {
    "loads.npz": lambda path, _: bomb(path, "loads.npy", (1 << 20, 8, 256), "int8"),
    "routing.npz": lambda path, _: bomb(path, "a_ids.npy", (1 << 24, 16, 8), "uint8"),
    "loads.json": lambda path, _: path.write_text(json.dumps([["x" * 10**7, *range(400)]])),
    "loads.csv": lambda path, _: path.write_text("1\n" * 4_000_000),
    **dict.fromkeys(("loads.npy", "packed.npz", "clusters.toml", "arrivals.txt"), huge),
    **dict.fromkeys(("model/config.json", "model/tokenizer.json", "demo/result.json"), huge),
    "model/model.safetensors.index.json": huge,
}


def main(folder, first, last):
    """Damage, read and mend one file after the other."""
    write_all(folder)
    read_by = commands(folder)
    whole = {name: (folder / name).read_bytes() for name in read_by}
    for name, command in read_by.items():  # all is imported and compiled, and memory is taken
        report(-1, name, outcome(command, folder / name))
    _limit_memory()
    todo = [(0, name, damage) for name, damage in BOMBS.items()]
    slow = [n for n, read in read_by.items() if isinstance(read, tuple) and read[0] != "plan"]
    names = slow + 2 * sorted(read_by.keys() - set(slow))
    todo += [(number, names[number % len(names)], mutate) for number in range(first, last)]
    for number, name, damage in todo:
        damage(folder / name, random.Random(number))
        report(number, name, outcome(read_by[name], folder / name))
        (folder / name).write_bytes(whole[name])


def mutate(path, rng):
    """One to three accidents."""
    path.write_bytes(damaged(path.read_bytes(), rng))


def report(number, name, words):
    print(json.dumps([number, name, words]), flush=True)


def _limit_memory():
    """One gigabyte more than the libraries take."""
    with open("/proc/self/status", encoding="ascii") as status:
        taken = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (taken + GIGABYTE, resource.RLIM_INFINITY))


def _too_slow(*_):
    raise TimeoutError(f"more than {SECONDS} s")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _too_slow)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
