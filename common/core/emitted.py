"""Records as the processes that measure write them; what reads them again has types of its own (records/schema.py).

Dataclasses, since the Pythons of some packages lack what the schema is made with.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar, Dict, Tuple


class Emitted:
    """A record; each kind is a dataclass with its fields.

    Attributes:
        record: its kind, which the line begins with.
        left_out: fields that the line has only where they are not None.
    """

    record: ClassVar[str]
    left_out: ClassVar[Tuple[str, ...]] = ()

    def to_json(self) -> Dict[str, Any]:
        """Return the record as its line holds it."""
        fields = asdict(self)  # type: ignore[call-overload]  # subclasses are dataclasses
        kept = {key: value for key, value in fields.items() if value is not None or key not in self.left_out}
        return {"record": self.record, **kept}
