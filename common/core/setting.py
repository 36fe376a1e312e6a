"""One setting of a run: its flag, its help, its default under each preset, and how readers use it.

A setting is declared once, as a field of common.core.settings.Settings.  The flags, the presets, the types of records,
what --sweep takes, what must agree between compared runs, and the headings of tables are all read from there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple, Union

from common.core.errors import UserError
from common.core.text import gathered

#: Part of a heading: a text to format with the value, or a function that makes it from the settings of the rows.
Heading = Union[str, Callable[[Mapping[str, Any]], str]]


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting.

    Args:
        default: its value where neither a flag nor a preset gives another.
        group: the title of its flags in --help.
        help: what it means, for --help: a capital first, no full stop at the end; its default is added.
        short: the sentence of the short --help; "" leaves it out there.
        type: turns the flag's text into a value, or raises UserError.
        choices: the values that the flag takes, if they are few.
        metavar: how --help names the value.
        extra: other arguments of argparse's add_argument.
        presets: its values by size ("quick"), workload ("chars"), both ("cpu,chars"), or with "--find-largest".
        default_text: how --help words the default; "" words it from `default` and `presets`.
        label: how a comparison names it.  "" means that runs with other values can be compared.
        unset: the word for None in comparisons, where None would say that nothing is known.
        in_rows: whether rows keep it though `label` is "".
        parts_tables: whether rows with other values stand in other tables.
        heading: what a table's heading says of it.
        heading_of_default: whether the heading also says so of the default.
        only: (key, values) of the setting, or "device" or "kind", without which this one has no effect.
        refused: whether giving it without `only` is an error.
        sweepable: whether --sweep takes it: it says what is measured, and not how.
        key: its name in Settings, set by `declared`.
        flag: its flag; by default its key with dashes.
    """

    default: Any
    group: str
    help: str
    short: str = ""
    type: Callable[[str], Any] = str
    choices: Tuple[Any, ...] = ()
    metavar: Optional[str] = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Any] = field(default_factory=dict)
    default_text: str = ""
    label: str = ""
    unset: Optional[str] = None
    in_rows: bool = False
    parts_tables: bool = True
    heading: Optional[Heading] = None
    heading_of_default: bool = True
    only: Optional[Tuple[str, Tuple[Any, ...]]] = None
    refused: bool = False
    sweepable: bool = True
    key: str = ""
    flag: str = ""

    def arguments(self) -> Dict[str, Any]:
        """Return what argparse's add_argument takes for the flag, but its help."""
        return {
            "dest": self.key,
            **({"choices": self.choices} if self.choices else {}),
            **({"type": self.type} if self.type is not str else {}),
            **({"metavar": self.metavar} if self.metavar else {}),
            **self.extra,
        }

    def help_text(self) -> str:
        """Return the help of the flag with its default, as argparse takes it."""
        names_of = gathered((worded(value), name) for name, value in self.presets.items())
        others = "; ".join(f"{value} with {' and '.join(names)}" for value, names in names_of.items())
        default = self.default_text or worded(self.default) + (f" ({others})" if others else "")
        return f"{self.help}. Default: {default}".replace("%", "%%")

    def parse(self, text: str) -> Any:
        """Return the value that the flag would give for `text`.  Raises UserError."""
        try:
            value = self.type(text)
        except (TypeError, ValueError):
            raise UserError(f"not a value of {self.flag}: {text!r}") from None
        if self.choices and value not in self.choices:
            raise UserError(f"{text!r} is none of {', '.join(map(str, self.choices))}")
        return value

    def applies(self, known: Mapping[str, Any]) -> bool:
        """Tell whether the setting has an effect beside these settings, "device" and "kind"."""
        return self.only is None or known.get(self.only[0]) in self.only[1]

    def heading_text(self, known: Mapping[str, Any]) -> str:
        """Return what a heading says of the setting, from what is known of the rows; "" for nothing."""
        if self.heading is None or not self.applies(known):
            return ""
        if not isinstance(self.heading, str):
            return self.heading(known)
        value = known.get(self.key)
        if value is None or value == self.unset or (value == self.default and not self.heading_of_default):
            return ""
        return self.heading.format("on" if value is True else "off" if value is False else value)


def setting(default: Any, group: str, help: str, **details: Any) -> Any:
    """Return the dataclass field that declares a setting; the arguments are those of Setting."""
    metadata = {"setting": Setting(default, group, help, **details)}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(fields: Sequence[Any]) -> Dict[str, Setting]:
    """Return the settings that dataclass fields declare, by name."""
    settings = {item.name: item.metadata["setting"] for item in fields}
    return {
        key: replace(value, key=key, flag=value.flag or "--" + key.replace("_", "-")) for key, value in settings.items()
    }


def tupled(value: Any) -> Any:
    """Return a value of JSON as a setting has it: a list as a tuple."""
    return tuple(value) if isinstance(value, list) else value


def worded(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={amount}" for key, amount in value.items())
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
