"""A real run on a terminal: the table and the verdict are redrawn in place after each round, also until Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

import forked
import pytest
from commands import ROOT, command

pytest.importorskip("tqdm", reason="tqdm draws the bar")
WIDTH, HEIGHT = 100, 50
FLAGS = ("--only", "reference", "--preset", "quick", "--max-seconds", "0.02", "--device", "cpu", "--wait", "0")
FLAGS += ("--passes", "correctness,timing")


def screen_of(printed: str) -> list:
    """Return the lines that a terminal shows in the end, those that were scrolled away too."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|[\s\S]", printed):
        if part.startswith("\x1b"):
            count = int(re.sub(r"\D", "", part) or 1)
            if part[-1] in "AF":
                row, column = max(row - count, 0), column if part[-1] == "A" else 0
            elif part[-1] == "J":
                lines[row:] = [lines[row][:column]]
            elif part[-1] == "K":
                lines[row] = lines[row][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
        else:
            if column == WIDTH:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return lines


def on_terminal(flags, stop_at=None):
    """Run benchmark_all.py on a terminal; return what it printed and its exit code.  stop_at: press Ctrl-C then."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    process = forked.start(command("benchmark_all.py", *flags), ROOT, environment, terminal=os.ttyname(theirs))
    printed, stopped, ends_at = b"", False, time.monotonic() + 300
    while time.monotonic() < ends_at:
        ended = process.poll() is not None
        if select.select([ours], [], [], 0 if ended else 0.2)[0]:
            printed += os.read(ours, 65536)
        elif ended:
            break
        if stop_at and not stopped and stop_at in printed.decode(errors="replace"):
            os.write(ours, b"\x03")
            stopped = True
    os.close(theirs)
    os.close(ours)
    return printed.decode(errors="replace"), process.wait(60)


def test_the_verdict_is_redrawn_in_place_after_each_round(tmp_path, tiny_shapes):
    flags = (*FLAGS, "--rounds", "5", "--shape-file", tiny_shapes, "--log-dir", tmp_path)
    printed, code = on_terminal(flags)
    assert code == 0, printed
    assert all(f"after {number} rounds" in printed for number in (3, 4, 5)) and "after 2 rounds" not in printed
    shown = screen_of(printed)
    assert not [line for line in shown if re.search(r"after \d rounds", line)]
    assert len([line for line in shown if line.startswith("VERDICT")]) == 1
    upto = printed[: printed.index("after 5 rounds") + 20]
    assert len([line for line in screen_of(upto) if re.search(r"after \d rounds", line)]) == 1


def test_ctrl_c_ends_in_the_table_of_what_is_known(tmp_path, tiny_shapes):
    flags = (*FLAGS, "--rounds", "200", "--shape-file", tiny_shapes, "--log-dir", tmp_path)
    printed, code = on_terminal(flags, stop_at="after 4 rounds")
    shown = screen_of(printed)
    assert code == 130, printed
    assert "VERDICT" in [line.strip() for line in shown] and any("--resume" in line for line in shown)
    assert not [line for line in shown if re.search(r"after \d+ rounds", line)]
