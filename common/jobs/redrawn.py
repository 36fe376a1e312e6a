"""Text at the end of a terminal that is drawn again in its place, above a progress bar."""

from __future__ import annotations

import os
import re
from typing import Any, List, TextIO, Tuple

COLORS = re.compile(r"\x1b\[[\d;]*m")
#: Move to the beginning of the line so many above, and erase from there to the end of the screen.
ERASE = "\x1b[{}F\x1b[J"


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that moves its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


def size_of_bar(stream: TextIO) -> Tuple[int, int]:
    """Return the columns and lines that tqdm may take: there is room for the ^C that a terminal echoes."""
    size = os.get_terminal_size(stream.fileno())
    return max(size.columns - 4, 1), size.lines


class Redrawn:
    """Hold the lines that are on the screen.

    Args:
        stream: a terminal.
        bar: of tqdm, in the last line; it is cleared while something is written.
    """

    def __init__(self, stream: TextIO, bar: Any):
        self.stream, self.bar = stream, bar
        self.lines: List[str] = []

    def draw(self, text: str) -> None:
        """Replace the last text by this one; of a text longer than the screen only the end is drawn."""
        self._erase()
        most = max(os.get_terminal_size(self.stream.fileno()).lines - 2, 1)
        lines = text.rstrip("\n").split("\n")
        while len(lines) > 1 and self._height(lines) > most:
            del lines[0]
        self._write(lines)
        self.bar.refresh()

    def above(self, line: str) -> None:
        """Write a line that stays, above the text."""
        lines = self.lines
        self._erase()
        self.bar.write(line, file=self.stream)
        self.bar.clear()
        self._write(lines)
        self.bar.refresh()

    def end(self) -> None:
        """Erase the text."""
        self._erase()

    def _erase(self) -> None:
        self.bar.clear()
        if self.lines:
            self.stream.write(ERASE.format(self._height(self.lines)))
            self.stream.flush()
        self.lines = []

    def _write(self, lines: List[str]) -> None:
        self.lines = lines  # before: Ctrl-C may come as soon as they are on the screen
        self.stream.write("".join(f"{line}\n" for line in lines))
        self.stream.flush()

    def _height(self, lines: List[str]) -> int:
        """Return how many lines of the screen these lines take; one wider than the screen takes several."""
        width = os.get_terminal_size(self.stream.fileno()).columns or 80
        return sum(max(-(-len(COLORS.sub("", line)) // width), 1) for line in lines)
