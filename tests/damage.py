"""Damaged files for tests: random accidents of disks, networks and editors."""

import io
import json
import random
import zipfile

import numpy as np

from ultraep.files.reading import DAMAGE

HUGE = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 10**20)
CONFUSED = (None, True, -1, 0, 0.5, 1e400, float("nan"), "x", "", [], [[]], {}, 10**20, "\x00")
ODD = (b"\x00", b"\x0c", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\n\n", b",", b"-", b"1e9", b"[" * 9)
BLOCK = 64


def damaged(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        content = rng.choice(ACCIDENTS)(content, rng)
    return content


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randint(0, len(content))]


def overwrite(content: bytes, rng: random.Random) -> bytes:
    begin = rng.randint(0, len(content))
    filler = rng.choice((rng.randbytes(BLOCK), bytes(BLOCK), b"9" * BLOCK))
    return content[:begin] + filler + content[begin + BLOCK :]


def insert(content: bytes, rng: random.Random) -> bytes:
    begin = rng.choice((0, len(content), rng.randint(0, len(content))))
    return content[:begin] + rng.choice(ODD) + content[begin:]


def other_numbers(content: bytes, rng: random.Random) -> bytes:
    digits = [place for place, byte in enumerate(content) if 48 <= byte <= 57]
    if not digits:
        return content
    place, number = rng.choice(digits), str(rng.choice(HUGE)).encode()
    return content[:place] + rng.choice((number, b"-1", b"x", b"")) + content[place + 1 :]


def member(content: bytes, rng: random.Random) -> bytes:
    """Damage, delete or repeat one array of an archive, and write a valid archive."""
    try:
        members = read_members(io.BytesIO(content))
    except (*DAMAGE, RuntimeError):  # encrypted
        return content
    name = rng.choice(sorted(members) or [""])
    how = rng.randrange(5)
    if how == 0:
        members.pop(name, None)
    elif how == 1:
        members["more.npy"] = members.get(name, b"")
    elif name:
        members[name] = rng.choice(ACCIDENTS_INSIDE)(members[name], rng)
    return archive_of(members, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))


def read_members(file) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def array_values(content: bytes, rng: random.Random) -> bytes:
    """Change a value, the dtype or the shape of an array."""
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False).copy()
    except DAMAGE:
        return content
    how, numbers = rng.randrange(4), array.dtype.kind in "iuf"
    if how < 2 and numbers and array.size:
        high = 2**31 - 1 if array.dtype.kind == "f" else np.iinfo(array.dtype).max
        value = rng.choice((-1, 0, 1, 2, 10**6, high, -high))
        small = array.dtype.itemsize < 4 or array.dtype.kind == "u"
        array.reshape(-1)[rng.randrange(array.size)] = abs(value) % 128 if small else value
    elif how == 2 and numbers:
        array = array.astype(rng.choice(("int8", "uint64", "float32", "float64", "bool", "<U3")))
    elif how == 3:
        flat = array.reshape(-1)
        array = rng.choice((flat, flat[:0], array[..., None], array[None]))
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def json_value(content: bytes, rng: random.Random) -> bytes:
    """Change or delete one value of JSON."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return content
    where, key, value = None, None, tree
    while isinstance(value, (dict, list)) and value and (where is None or rng.random() < 0.7):
        key = rng.choice(sorted(value)) if isinstance(value, dict) else rng.randrange(len(value))
        where, value = value, value[key]
    if where is None:
        return content
    if rng.random() < 0.2:
        del where[key]
    else:
        where[key] = rng.choice(CONFUSED)
    return json.dumps(tree).encode()


ACCIDENTS = (flip_bits, cut, overwrite, insert, other_numbers, member, member, json_value)
ACCIDENTS_INSIDE = (array_values, array_values, flip_bits, cut, other_numbers)
