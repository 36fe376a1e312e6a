"""Parse the command line of every command, with errors of one line.  No torch here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection
from contextlib import suppress
from textwrap import fill
from typing import Any, NoReturn

from rnnt_bench.core import errors, flag_types
from rnnt_bench.core.settings import SETTINGS
from rnnt_bench.core.text import closest


class Parser(argparse.ArgumentParser):
    """Parse as argparse does, but an error is one line, and an epilog of several lines is printed
    as it is.

    examples: commands that the short --help ends with, below the flags with a text for it (add)."""

    def __init__(self, *arguments: Any, examples: str = "", **options: Any):
        errors.safe_streams()  # before --help or an error is printed
        if "\n" in (options.get("epilog") or ""):
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*arguments, **options)
        if self.add_help:
            self._actions[0].help = "Show this help and exit."
        self.examples = examples
        if examples:
            words = "Show every flag, with its unit and default."
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=words)

    def print_help(self, file: Any = None) -> None:
        self._print_message(
            self.format_short_help() if self.examples else self.format_help(), file or sys.stdout
        )

    def format_short_help(self) -> str:
        """Return the first paragraph of the description, the flags that have a short text, and the
        examples."""
        lines = []
        usage = f"usage: {self.prog} "
        for action in self._actions:
            name = " ".join(action.option_strings[:1])
            value = "" if action.nargs == 0 else str(action.metavar or "VALUE")
            if not name:
                usage += f"{value} ... "
            if text := getattr(action, "short", ""):
                lines.append(f"  {f'{name} {value}'.strip():<26}  {text}")
        usage += "[flags]     (--help-all: every flag, with unit and default)"
        first = " ".join((self.description or "").strip().partition("\n\n")[0].split())
        parts = (
            usage,
            fill(first, 100, break_on_hyphens=False),
            "\n".join(lines),
            self.examples.format(prog=self.prog),
        )
        return "\n\n".join(parts)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        if "_ARGCOMPLETE" in os.environ:  # the shell asks what could follow
            with suppress(ImportError):
                import argcomplete  # type: ignore[import-not-found, unused-ignore]  # a user's own

                argcomplete.autocomplete(self)
        return super().parse_known_args(*arguments, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            words = f"give one of {', '.join(choices)}, not {value!r}{closest(str(value), choices)}"
            raise argparse.ArgumentError(action, words)

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: --"):
            message += closest(message.split()[2].partition("=")[0], self._option_string_actions)
        self.exit(errors.EXIT_USAGE, f"{self.prog}: error: {message} (--help tells more)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(errors.finished(status), message)

    def _print_message(self, message: str, file: Any = None) -> None:
        with suppress(OSError):  # as Python 3.12 does: a help that cannot be written is no error
            super()._print_message(message, file)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def refuse(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    keys: Collection[str],
    words: str,
) -> None:
    """Raise UserError for the first of these `keys` that has another value than its flag's default.
    words: why it has no effect, and what to do."""
    for key in keys:
        if getattr(arguments, key, None) != parser.get_default(key):
            flag = SETTINGS[key].flag if key in SETTINGS else f"--{key.replace('_', '-')}"
            raise errors.UserError(f"{flag} {words}")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the log folders that a reader searches."""
    words = (
        "Log folders, which are searched; a results.jsonl or a single trace works too. Default: log"
    )
    parser.add_argument("log", nargs="*", metavar="LOG", type=flag_types.path, help=words)
