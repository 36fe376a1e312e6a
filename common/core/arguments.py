"""Parse the command line of every command, with errors of one line.  Does not import torch."""

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
    """Parse as argparse does, but print an error as one line.

    examples: example commands, with {prog} for the name of the program.  With examples, --help is
    short: it lists only the flags that have a `short` text.  --help-all lists every flag."""

    def __init__(self, *arguments: Any, examples: str = "", **options: Any):
        errors.safe_streams()  # before --help or an error is printed
        if "\n" in (options.get("epilog") or ""):  # argparse would join its lines
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*arguments, **options)
        if self.add_help:
            # The first action is --help, which argparse adds.
            self._actions[0].help = "Show this help and exit."
        self.examples = examples
        if examples:
            help_text = "Show every flag, with its unit and default."
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help=help_text)

    def print_help(self, file: Any = None) -> None:
        """Print the short help of a parser with examples, else argparse's."""
        text = self.format_short_help() if self.examples else self.format_help()
        self._print_message(text, file or sys.stdout)

    def format_short_help(self) -> str:
        """Return the text of --help for a parser with examples.

        It has the usage, the first paragraph of the description, the flags with a `short` text, and
        the examples."""
        usage = f"usage: {self.prog} "
        flags = []
        for action in self._actions:
            value = "" if action.nargs == 0 else str(action.metavar or "VALUE")
            if not action.option_strings:  # a positional argument
                usage += f"{value} ... "
            if short := getattr(action, "short", ""):
                flag = " ".join([*action.option_strings[:1], value]).strip()
                flags.append(f"  {flag:<26}  {short}")
        usage += "[flags]     (--help-all: every flag, with unit and default)"
        first_paragraph = " ".join((self.description or "").strip().partition("\n\n")[0].split())
        parts = (
            usage,
            fill(first_paragraph, 100, break_on_hyphens=False),
            "\n".join(flags),
            self.examples.format(prog=self.prog),
        )
        return "\n\n".join(parts)

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        """Parse as argparse does; print completions instead where a shell's tab key called us."""
        if "_ARGCOMPLETE" in os.environ:
            with suppress(ImportError):  # argcomplete works if the user has installed it
                import argcomplete  # type: ignore[import-not-found, unused-ignore]

                argcomplete.autocomplete(self)
        return super().parse_known_args(*arguments, **options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise an ArgumentError if a value is none of a flag's choices.  The message lists the
        choices, and suggests one of them if the value is close to it."""
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            guess = closest(str(value), choices)
            raise argparse.ArgumentError(
                action, f"give one of {', '.join(choices)}, not {value!r}{guess}"
            )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit; for an unknown flag, the line names the closest flag."""
        if message.startswith("unrecognized arguments: --"):
            flag = message.split()[2].partition("=")[0]
            message += closest(flag, self._option_string_actions)
        self.exit(errors.EXIT_USAGE, f"{self.prog}: error: {message} (--help tells more)\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit as argparse does, after what is in stdout's buffer is written or dropped."""
        super().exit(errors.flushed(status), message)

    def _print_message(self, message: str, file: Any = None) -> None:
        with suppress(OSError):  # Python 3.12 ignores it too, when a help cannot be written
            super()._print_message(message, file)


class _HelpAll(argparse.Action):
    """Print the help of every flag, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser._print_message(parser.format_help(), sys.stdout)
        parser.exit()


def refuse(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    keys: Collection[str],
    reason: str,
) -> None:
    """Raise UserError if the user gave one of these flags, which have no effect.

    A flag with the value of its default counts as not given.

    Args:
        arguments: what `parser` parsed.
        keys: the names of the flags in `arguments`.
        reason: why they have no effect, and what to do.  The message is "--flag reason"."""
    for key in keys:
        if getattr(arguments, key, None) != parser.get_default(key):
            flag = SETTINGS[key].flag if key in SETTINGS else f"--{key.replace('_', '-')}"
            raise errors.UserError(f"{flag} {reason}")


def add_logs(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument LOG ..., the folders that are searched for results."""
    help_text = (
        "Log folders, which are searched; a results.jsonl or a single trace works too. Default: log"
    )
    parser.add_argument("log", nargs="*", metavar="LOG", type=flag_types.path, help=help_text)
