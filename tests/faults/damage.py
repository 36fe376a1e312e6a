"""Damage to a file, another way for each seed: to its bytes, to its lines, to the values in its JSON."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

#: What a value becomes: other types, numbers that are none, text that a page or a terminal obeys.
VALUES: list[Any] = [None, True, 0, -1, 2**63, 10**400, 0.5, 1e300, float("nan"), float("inf"), "", "2026", "\x1b[2J"]
VALUES += ["<script>alert(1)</script>", "\ud800", "\x00", "9" * 5000, "../../etc/passwd"]
VALUES += [[], {}, ["a"], {"a": 1}, [None], {"record": "run"}, [1, "a", {}]]
#: What a line becomes.
LINES = [b"", b"{}", b"[]", b"null", b"nonsense", b"\xff\xfe", b'{"a":' * 5000 + b"1" + b"}" * 5000]


def mutated(content: bytes, chance: random.Random) -> tuple[bytes, list[bytes]]:
    """Return the damaged content, and the lines of the content that are whole in it, wherever they stand."""
    packed = content[:2] == b"\x1f\x8b"
    plain = gzip.decompress(content) if packed else content
    damaged = chance.choice([_bytes, _lines, _values, _values])(plain, chance)
    left = set(damaged.split(b"\n")[:-1])
    kept = [line for line in plain.split(b"\n")[:-1] if line in left]
    return (gzip.compress(damaged, 1) if packed else damaged), kept


def _bytes(content: bytes, chance: random.Random) -> bytes:
    """Cut the content as a killed writer does, or overwrite, insert or remove some of it."""
    at, width = chance.randrange(len(content) + 1), chance.choice([1, 8, 300])
    noise = chance.choice([bytes(width), bytes(chance.randrange(256) for _ in range(width))])
    end = content[at + chance.choice([0, width]) :]
    return chance.choice([content[:at], content[:at] + noise + end, content[:at] + end, noise, b"", content + content])


def _lines(content: bytes, chance: random.Random) -> bytes:
    """Remove, repeat, move, cut or replace a line."""
    lines = content.split(b"\n")
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    line = lines.pop(at)
    other = chance.choice([*LINES, line[: len(line) // 2], line.replace(b":", b":" + 2000 * b"[", 1), line + b"\r"])
    changes = {at: [other], to: [line]}
    for index, new in chance.choice([{}, changes, {to: [line]}, {to: [line, line]}, {at: [other]}]).items():
        lines[index:index] = new
    return b"\n".join(lines)


def _values(content: bytes, chance: random.Random) -> bytes:
    """Replace a value anywhere in the JSON of a line, or remove it."""
    lines = content.split(b"\n")
    at = chance.randrange(len(lines))
    try:
        whole = value = json.loads(lines[at])
    except (ValueError, RecursionError):
        return _lines(content, chance)
    position = None
    while isinstance(value, (dict, list)) and value:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        position, value = (value, key), value[key]
        if chance.random() < 0.3:
            break
    if position is None:
        return _lines(content, chance)
    holder, key = position
    if chance.random() < 0.9:
        holder[key] = chance.choice(VALUES)
    else:
        del holder[key]
    lines[at] = json.dumps(whole).encode()
    return b"\n".join(lines)
