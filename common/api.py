"""Use the suite from Python: read what it measured as rows, measure and check a loss of your own.

`load`, `measure` and `check` run the command in a process of its own: nothing of the suite is
imported into yours, and a loss that crashes ends no notebook.  `assert_is_transducer_loss` calls
the loss in your process, for tests, and `FlopCounter` counts what runs in your process.
"""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rnnt_bench.core.files import PACKAGE

#: "mypackage.rnnt:loss", or the function.
Loss = str | Callable[..., Any]
#: How many columns a notebook shows.
SHOWN = 11


class Row(dict[str, Any]):
    """Hold what was measured of one loss in one configuration, with the keys of ``rnnt-bench
    summarize --format json``."""

    @property
    def plain(self) -> dict[str, Any]:
        """Return the values that are no dicts or lists, in the order of the keys."""
        return {key: value for key, value in self.items() if not isinstance(value, (dict, list))}

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        return Results([self])._repr_html_()


class Results(list[Row]):
    """Hold rows, one for each loss and configuration."""

    def to_frame(self) -> Any:
        """Return a pandas DataFrame of the plain values, or a list of dicts if pandas is not
        installed."""
        rows = [row.plain for row in self]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def _repr_html_(self) -> str:
        """Return a table of the first columns for a notebook."""
        heads = list(self[0])[:SHOWN] if self else []
        lines = [_html_line(heads)]
        lines += [_html_line([row.get(head, "") for head in heads]) for row in self]
        return f"<table>{''.join(lines)}</table>"


def _html_line(cells: Sequence[Any]) -> str:
    """Return a line of a table in HTML."""
    line = ""
    for cell in cells:
        text = f"{cell:.4g}" if isinstance(cell, float) else html.escape(str(cell))
        line += f"<td>{text}</td>"
    return f"<tr>{line}</tr>"


class Check(NamedTuple):
    """Hold the answers of a loss to the corner cases; true if all are right.

    Attributes:
        right: whether every case was answered right, or does not apply
        findings: what was wrong: "ragged: differs: ..."
        cells: the outcome of each case that was asked, by its name
    """

    right: bool
    findings: list[str]
    cells: dict[str, dict[str, Any]]

    def __bool__(self) -> bool:
        return self.right


def load(
    path: str | Path | Sequence[str | Path] = "log", all_runs: bool = False, tool: str = ""
) -> Results:
    """Return the rows of the losses in log folders.  If there are none, return those of tools.

    Args:
        path: a log folder, or several.
        all_runs: earlier runs too, not only the newest of each loss and configuration.
        tool: the rows of this tool instead: "profile", "inference", "pipeline", "flops", "check".

    Raises ValueError if `path` has no results at all.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    flags = ["--all-runs"] if all_runs else []
    rows = json.loads(_run("summarize", *map(str, paths), "--format", "json", *flags))
    wanted = [row for row in rows if row.get("tool", "") == tool]
    if not (wanted or tool):
        wanted = rows
    return Results(map(Row, wanted))


def measure(
    loss: Loss,
    vocab_size: int = 500,
    beside: Sequence[str] = (),
    log_dir: str | Path | None = None,
    **flags: Any,
) -> Results:
    """Measure time, memory and correctness of a loss; return its row, then those of the losses
    beside it.

    Args:
        loss: a function ``loss(logits, targets, T_lengths, U_lengths)`` at the top level of a
            module or script, or "mypackage.rnnt:loss".
        vocab_size: V, blank included.
        beside: names of losses to measure beside it, "torchaudio" say.
        log_dir: where the records go; None keeps none.
        flags: flags of ``rnnt-bench run``: preset="quick", rounds=3, passes="timing,memory".

    Raises ValueError for a loss that a process cannot import, and for flags that do not fit.
    """
    options = {"passes": "timing,memory", **flags, "vocab_size": vocab_size, "loss": _target(loss)}
    # --skip leaves the loss of --loss in.
    choice = ["--only", ",".join(beside)] if beside else ["--skip", "all"]
    with tempfile.TemporaryDirectory(prefix="rnnt-bench-") as scratch:
        folder = str(log_dir or scratch)
        arguments = [*_as_arguments(options), *choice, "--quiet", "--log-dir", folder]
        _run("run", *arguments, allowed=(0, 1))
        # False sorts before True: the loss's own row is the first.
        return Results(sorted(load(folder), key=lambda row: row["name"] in beside))


def check(loss: Loss, **flags: Any) -> Check:
    """Ask a loss the corner cases of ``rnnt-bench check``.

    Args:
        loss: a function or "mypackage.rnnt:loss", as `measure` takes it.
        flags: flags of ``rnnt-bench check``: cases="ragged,no_targets", device="cuda".

    Raises ValueError for a loss that a process cannot import.
    """
    options = {**flags, "loss": _target(loss), "format": "json"}
    with tempfile.TemporaryDirectory(prefix="rnnt-bench-") as scratch:
        arguments = [*_as_arguments(options), "--quiet", "--log-dir", scratch]
        rows = json.loads(_run("check", *arguments, allowed=(0, 1)))
    # A loss that could not be judged has one row without a case, whose result is its status.
    findings = [
        ": ".join(filter(None, [row["case"], row["result"], row["message"]]))
        for row in rows
        if row["result"] not in ("pass", "n/a")
    ]
    return Check(not findings, findings, {row["case"]: row for row in rows if row["case"]})


def assert_is_transducer_loss(
    loss: Callable[..., Any], device: str = "cpu", dtype: str = "float32"
) -> None:
    """Raise AssertionError, with what is wrong, unless `loss` is the transducer loss.

    Loss and gradient are compared with a float64 oracle on small batches: ragged, without targets,
    of one frame, with sharp logits, and under an upstream gradient.

    Args:
        loss: ``loss(logits, targets, T_lengths, U_lengths)``, called in this process; it may be a
          closure.
        device: "cpu" or "cuda".
        dtype: dtype of the logits, "float32" or another.
    """
    from rnnt_bench.losses.passes.correctness import wrong_of

    wrong = wrong_of(loss, device, dtype)
    if wrong:
        raise AssertionError(
            f"{getattr(loss, '__name__', loss)} is not the transducer loss: {wrong}"
        )


def __getattr__(name: str) -> Any:
    """Return `FlopCounter`, the counter of operations of docs/flops.md, or `flop_rules`, the module
    of its rules."""
    if name not in ("FlopCounter", "flop_rules"):
        raise AttributeError(f"module 'rnnt_bench' has no attribute {name!r}")
    from rnnt_bench.flops import counter, rules

    return counter.FlopCounter if name == "FlopCounter" else rules


def _target(loss: Loss) -> str:
    """Return the value of --loss for a loss, MODULE:FUNCTION or FILE.py:FUNCTION.  Raises
    ValueError for a function that another process cannot import."""
    if isinstance(loss, str):
        return loss
    module = getattr(loss, "__module__", None)
    # A function within another has "<locals>" in its name, a lambda "<lambda>".  Both are refused,
    # as is an object without a name.
    name = getattr(loss, "__qualname__", "<")
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    is_script = module == "__main__"
    if module is None or "<" in name or (is_script and file is None):
        raise ValueError(
            f"{loss}: give a function at the top level of a module or script, which a process can import"
        )
    return f"{file if is_script else module}:{name}"


def _as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as the words of a command line: {"vocab_size": 500} as "--vocab-size", "500"."""
    arguments = []
    for key, value in flags.items():
        arguments += [f"--{key.replace('_', '-')}", str(value)]
    return arguments


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of rnnt-bench in a process of its own, which imports from the same folders as
    this one; return how it ended, with stdout and stderr."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    # Python adds the folders of its installation itself.
    folders = [folder for folder in folders if not folder.startswith((sys.prefix, sys.base_prefix))]
    python_path = os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *folders]))
    return subprocess.run(
        [sys.executable, "-m", "rnnt_bench", *arguments],
        env={**os.environ, "PYTHONPATH": python_path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of stderr of a command that has ended."""
    return (done.stderr.strip().splitlines() or ["no output"])[-1]


def _run(*arguments: str, allowed: Sequence[int] = (0,)) -> str:
    """Run a command of rnnt-bench, pass its warnings on, and return its stdout.  Raises ValueError,
    with the last line of stderr, if its exit code is not `allowed`, or it had a traceback."""
    done = command(*arguments)
    for line in done.stderr.splitlines():
        if line.startswith("warning: "):
            warnings.warn(line.removeprefix("warning: "), stacklevel=3)
    if done.returncode not in allowed or "Traceback (most recent call last)" in done.stderr:
        raise ValueError(last_line(done))
    return done.stdout
