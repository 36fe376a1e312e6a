"""Writes what a shell needs to complete rnnt-bench: its commands, their flags, and the values of flags that have few.

Made from the parsers of the commands, so that a new flag is completed without an edit here.
"""

from __future__ import annotations

import argparse
import re
from typing import Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from common.core.implementations import with_variants

SHELLS = ("bash", "zsh", "fish")
#: Values of flags that take more than these, or several of them.
VALUES: Mapping[str, Tuple[str, ...]] = {
    "--device": ("auto", "cpu", "cuda"),
    **dict.fromkeys(("--only", "--skip"), tuple(row.name for row in with_variants() if not row.template)),
}
LONGEST_HELP = 60  # characters


class Flag(NamedTuple):
    """A flag to complete.  values: those that may follow; takes: whether it takes a value."""

    name: str
    help: str
    values: Tuple[str, ...]
    takes: bool


def flags_of(parser: argparse.ArgumentParser) -> List[Flag]:
    """Return the long flags of a command."""
    result = []
    for action in parser._actions:
        name = next((option for option in action.option_strings if option.startswith("--")), "")
        if name and action.help != argparse.SUPPRESS:
            values = tuple(map(str, action.choices)) if action.choices else VALUES.get(name, ())
            result.append(Flag(name, _brief(action.help or ""), values, action.nargs != 0))
    return result


def _brief(text: str) -> str:
    """Return the beginning of a flag's help, without characters that mean something to a shell."""
    plain = re.sub(r"[^\w .,=-]+", " ", text.replace("%%", " percent")).split()
    return " ".join(plain)[:LONGEST_HELP].strip()


def script(shell: str, program: str, summaries: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> str:
    """Return the completion of `program` for one of SHELLS.

    Args:
        summaries: a line about each command.
        flags: those of each command.
    """
    lines = {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](program, summaries, flags)
    return "\n".join(lines) + "\n"


def _bash(program: str, summaries: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> Iterator[str]:
    yield "_rnnt_bench() {"
    yield '    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield f'    if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(summaries)} --help --version"; else'
    yield '    case "${COMP_WORDS[1]} $previous" in'
    for command, of in flags.items():
        for flag in of:
            if flag.values:
                yield f'        "{command} {flag.name}") words="{" ".join(flag.values)}";;'
    yield "    esac"
    yield '    if [ -z "$words" ]; then case "${COMP_WORDS[1]}" in'
    for command, of in flags.items():
        yield f'        {command}) words="{" ".join(flag.name for flag in of)}";;'
    yield "    esac; fi; fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$current"))'
    yield "}"
    yield f"complete -o default -F _rnnt_bench {program}"


def _zsh(program: str, summaries: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> Iterator[str]:
    yield f"#compdef {program}"
    yield "_rnnt_bench() {"
    yield "    local -a commands"
    commands = " ".join(f"'{command}:{_brief(summary)}'" for command, summary in summaries.items())
    yield f"    commands=({commands})"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    local command=$words[2]; shift words; (( CURRENT-- ))"
    yield "    case $command in"
    for command, of in flags.items():
        specs = []
        for flag in of:
            values = f"({' '.join(value.replace(':', chr(92) + ':') for value in flag.values)})" if flag.values else ""
            specs.append(f"'{flag.name}[{flag.help}]{f':value:{values}' if flag.takes else ''}'")
        yield f"        {command}) _arguments {' '.join(specs)} '*:file:_files';;"
    yield "    esac"
    yield "}"
    yield f"compdef _rnnt_bench {program}"


def _fish(program: str, summaries: Mapping[str, str], flags: Mapping[str, Sequence[Flag]]) -> Iterator[str]:
    for command, summary in summaries.items():
        yield f"complete -c {program} -n __fish_use_subcommand -f -a {command} -d '{_brief(summary)}'"
    for command, of in flags.items():
        for flag in of:
            values = f" -a '{' '.join(flag.values)}'" if flag.values else ""
            needed = f" -r{values}" if flag.takes else ""
            seen = f"-n '__fish_seen_subcommand_from {command}'"
            yield f"complete -c {program} {seen} -l {flag.name[2:]}{needed} -d '{flag.help}'"


def by_command(parsers: Mapping[str, argparse.ArgumentParser]) -> Dict[str, List[Flag]]:
    """Return the flags of each command."""
    return {command: flags_of(parser) for command, parser in parsers.items()}
