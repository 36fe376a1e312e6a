"""Define what a tool of its own gives to the page, the summary and the verdict, which know no tool.

The command registers the tools (common/command.py); where nothing did, there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional, Sequence

from common.present.section import Section
from common.present.table import Values


@dataclass(frozen=True)
class Slice:
    """Describe a tool to those that show results; `paths` are the log folders that are searched.

    Attributes:
        sections: (folder of the page, paths) -> its sections of the page.
        holds: path -> whether a run of the tool is in, at or under it.
        rows: paths -> its rows for csv and json.
        text: (paths, "table" or "markdown") -> its runs as text, one string a run.
        caveats: (loss, paths) -> what to beware of in a loss, None where the tool never judged it.
    """

    sections: Callable[[Path, Sequence[Path]], List[Section]]
    holds: Callable[[Path], bool] = lambda path: False
    rows: Callable[[Sequence[Path]], List[Values]] = lambda paths: []
    text: Callable[[Sequence[Path], str], List[str]] = lambda paths, format: []
    caveats: Optional[Callable[[str, Sequence[Path]], Optional[List[str]]]] = None


def _none() -> Sequence[Slice]:
    return ()


_provider: Callable[[], Sequence[Slice]] = _none


def provide(provider: Callable[[], Sequence[Slice]]) -> None:
    """Set the function that returns all slices, in the order of the page; it is called when they are needed."""
    global _provider
    _provider = provider


def registered() -> Sequence[Slice]:
    """Return all slices."""
    return _provider()


def caveats(loss: str, paths: Sequence[Path]) -> Optional[List[str]]:
    """Return what to beware of in a loss, [] for nothing; None where no slice judged it."""
    answers = [each.caveats(loss, paths) for each in registered() if each.caveats]
    judged = [answer for answer in answers if answer is not None]
    return [caveat for answer in judged for caveat in answer] if judged else None
