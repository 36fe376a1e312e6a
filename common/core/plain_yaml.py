"""YAML as plain data: no tags that make objects, and no key twice."""

from __future__ import annotations

from typing import Any

from common.core.errors import UserError

#: Bytes of the largest file that is read: more than anyone writes by hand.
LARGEST_FILE = 2**20


def parsed(text: str, where: str) -> Any:
    """Return what the YAML `text` says.  where: names it in messages.  Raises UserError."""
    try:
        import yaml
    except ImportError as error:
        raise UserError(f"{where} needs PyYAML, which is not installed here: pip install PyYAML") from error

    class Plain(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for index, key in enumerate(keys):
                if key in keys[:index]:
                    raise yaml.YAMLError(f"{key!r} is given twice, again{node.value[index][0].start_mark}; keep one")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Plain)
    except Exception as error:  # PyYAML raises errors of any kind for a text that its tag cannot take
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        raise UserError(f"{where}: no YAML of plain data ({reason})") from error
