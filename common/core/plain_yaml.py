"""YAML as plain data: no tags that make objects, no key twice, and no more values than anyone writes by hand."""

from __future__ import annotations

from typing import Any, Dict, List, Set

from common.core.errors import UserError
from common.core.text import shown

#: Bytes of a file, and values in it where aliases stand for what they name: a few aliases of aliases make billions.
LARGEST_FILE, MOST_VALUES = 2**20, 10_000


def parsed(text: str, where: str) -> Any:
    """Return what the YAML `text` says.  where: names it in messages.  Raises UserError, and ImportError where
    PyYAML is not installed."""
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            if _values(root, {}, set(), where) > MOST_VALUES:
                raise UserError(f"{where}: more than {MOST_VALUES:,} values, its aliases unfolded; give fewer")
            _check_scalars(loader, root, where)
            return loader.construct_document(root)
        finally:
            loader.dispose()
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where}: no YAML of plain data ({reason})") from error


def _values(node: Any, known: Dict[int, int], above: Set[int], where: str) -> int:
    """Return how many values a node has, aliases unfolded.  known: counts by the id of the node; above: ids of the
    nodes that it lies in.  Raises UserError for a key that a mapping has twice, and a node that lies in itself."""
    if not isinstance(node.value, list):
        return 1
    key = id(node)
    if key in above:
        raise UserError(f"{where}, line {_line(node)}: a value that is part of itself; write it out")
    if key not in known:
        above.add(key)
        known[key] = 1 + sum(_values(child, known, above, where) for child in _children(node))
        above.remove(key)
        _check_keys(node, where)
    return known[key]


def _children(node: Any) -> List[Any]:
    """Return the nodes directly in a list or a mapping, keys among them."""
    return [child for entry in node.value for child in (entry if isinstance(entry, tuple) else (entry,))]


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _check_keys(node: Any, where: str) -> None:
    lines: Dict[str, int] = {}
    for key in (entry[0] for entry in node.value if isinstance(entry, tuple)):
        if not isinstance(key.value, str):
            continue
        if key.value in lines:
            words = f"{shown(key.value)} is given twice, first in line {lines[key.value]}; keep one"
            raise UserError(f"{where}, line {_line(key)}: {words}")
        lines[key.value] = _line(key)


def _check_scalars(loader: Any, root: Any, where: str) -> None:
    """Raise UserError for a text that its tag cannot take, which PyYAML answers with errors of any kind, for an integer
    of more than 64 bits, and for a surrogate, which no file can hold."""
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node.value, list):
            waiting += _children(node)
            continue
        if node.tag.endswith(":merge"):  # the key <<, which is no value
            continue
        try:
            value = loader.construct_object(node)
        except yaml.YAMLError:  # says where by itself
            raise
        except Exception as error:
            kind = node.tag.rpartition(":")[2]
            raise UserError(f"{where}, line {_line(node)}: {shown(node.value)} is not of the type {kind}") from error
        if isinstance(value, int) and value.bit_length() > 64:
            raise UserError(f"{where}, line {_line(node)}: {shown(node.value)} is too large a number")
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UserError(f"{where}, line {_line(node)}: {shown(node.value)} is half of a character")
