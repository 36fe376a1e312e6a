"""Damage to a file, another way for each seed: to its bytes, to its lines, to the values in its JSON."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any, Callable, List, Optional, Tuple

#: What a value becomes: other types, numbers that are none, text that a page or a terminal obeys.
VALUES: List[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 10**400, 0.5, -0.0, 1e300, -1e300, float("nan"), float("inf")),
    *(
        "",
        "x",
        "2026",
        "../../etc/passwd",
        "\x1b[2J",
        "<script>alert(1)</script>",
        "\ud800",
        "\x00",
        "é" * 500,
        "9" * 5000,
    ),
    *([], {}, [[]], ["a"], {"a": 1}, [None], [float("nan")], {"record": "run"}, [1, "a", {}]),
]


def mutated(content: bytes, chance: random.Random) -> Tuple[bytes, List[bytes]]:
    """The damaged content, and the lines of the content that are whole in it, wherever they stand."""
    packed = content[:2] == b"\x1f\x8b"
    if packed and chance.random() < 0.5:
        return _of_bytes(content, chance), []
    plain = gzip.decompress(content) if packed else content
    change = chance.choice([_of_lines, _of_values, _of_values, _of_values, None])
    if change is None:
        mutated = _of_bytes(plain, chance)
    else:
        lines = plain.split(b"\n")
        for _ in range(chance.choice([1, 1, 1, 4])):
            lines = change(lines, chance)
        mutated = b"\n".join(lines)
    left = set(mutated.split(b"\n")[:-1])
    kept = [line for line in plain.split(b"\n")[:-1] if line in left]
    return (gzip.compress(mutated, 1) if packed else mutated), kept


def _of_bytes(content: bytes, chance: random.Random) -> bytes:
    at, width = chance.randrange(len(content) + 1), chance.choice([1, 8, 300])
    noise = bytes(chance.randrange(256) for _ in range(width))
    return chance.choice(
        [
            content[:at],  # a writer that was killed
            content[at:],
            content[:at] + noise + content[at:],
            content[:at] + noise + content[at + width :],
            content[:at] + bytes(width) + content[at + width :],
            b"",
            noise,
            content + content,
        ]
    )


def _of_lines(lines: List[bytes], chance: random.Random) -> List[bytes]:
    at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
    line = lines[at]
    deep = b'{"a":' * 5000 + b"1" + b"}" * 5000
    change: List[Callable[[], List[bytes]]] = [
        lambda: lines[:at] + lines[at + 1 :],
        lambda: [*lines[:to], line, *lines[to:]],
        lambda: [*lines[:at], *reversed(lines[at : at + 3]), *lines[at + 3 :]],
        lambda: [*lines[:at], chance.choice([b"", b"{}", b"[]", b"null", b"nonsense", b"\xff\xfe", deep]), *lines[at:]],
        lambda: [*lines[:at], line[: len(line) // 2], *lines[at + 1 :]],
        lambda: [*lines[:at], line.replace(b":", b":" + 2000 * b"[", 1), *lines[at + 1 :]],
        lambda: [*lines[:at], line + b"\r", *lines[at + 1 :]],
        lambda: lines[: at + 1],
    ]
    return chance.choice(change)()


def _of_values(lines: List[bytes], chance: random.Random) -> List[bytes]:
    """A value anywhere in the JSON of a line, or of all lines together, becomes another one, or goes."""
    at = chance.randrange(len(lines))
    for low, high in ((at, at + 1), (0, len(lines))):
        try:
            value = json.loads(b"\n".join(lines[low:high]))
        except (ValueError, RecursionError):
            continue
        position = _position(value, chance)
        if position is None:
            continue
        holder, key = position
        action = chance.random()
        if action < 0.8:
            holder[key] = chance.choice(VALUES)
        elif action < 0.9:
            del holder[key]
        elif isinstance(holder, dict):
            holder[chance.choice(["record", "job", "status", "name", "x", ""])] = holder.pop(key)
        else:
            holder.append(holder[key])
        return [*lines[:low], json.dumps(value).encode(), *lines[high:]]
    return _of_lines(lines, chance)


def _position(value: Any, chance: random.Random) -> Optional[Tuple[Any, Any]]:
    """Return a random position in a JSON value: (its list or mapping, its index or key)."""
    position = None
    while isinstance(value, (dict, list)) and value:
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        position, value = (value, key), value[key]
        if chance.random() < 0.3:
            break
    return position
