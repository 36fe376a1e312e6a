"""The suite from Python: what it measured as rows, and a loss of one's own measured and checked.

`load`, `measure` and `check` run the command in a process of its own: nothing of the suite is
imported into yours, and a loss that crashes ends no notebook.  `assert_is_transducer_loss` calls
the loss in your process, for tests, and `FlopCounter` counts what runs in it.
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

Loss = str | Callable[..., Any]
#: Columns that a notebook shows.
SHOWN = 11


class Row(dict[str, Any]):
    """A row: its plain values, as ``rnnt-bench summarize --format csv`` has them, then what has
    parts."""

    @property
    def plain(self) -> dict[str, Any]:
        """Return the values without parts: the same keys for every run, the table's first."""
        return {key: value for key, value in self.items() if not isinstance(value, (dict, list))}

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return Results([self])._repr_html_()


class Results(list[Row]):
    """Rows, one for each loss and configuration, with the keys of ``rnnt-bench summarize --format
    json``."""

    def to_frame(self) -> Any:
        """Return a pandas DataFrame of the plain values; a list of them where pandas is not
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
        body = ""
        for line in [heads, *([row.get(head, "") for head in heads] for row in self)]:
            words = (
                f"{cell:.4g}" if isinstance(cell, float) else html.escape(str(cell))
                for cell in line
            )
            body += f"<tr>{''.join(f'<td>{word}</td>' for word in words)}</tr>"
        return f"<table>{body}</table>"


class Check(NamedTuple):
    """right: whether every case was answered right, or does not apply; findings: "case: what was
    wrong"; cells: the outcome of each case that was asked."""

    right: bool
    findings: list[str]
    cells: dict[str, dict[str, Any]]

    def __bool__(self) -> bool:
        return self.right


def load(
    path: str | Path | Sequence[str | Path] = "log", all_runs: bool = False, tool: str = ""
) -> Results:
    """Return the rows of the losses in log folders; those of runs of a model where there are no
    others.

    Args:
        path: a log folder, or several.
        all_runs: earlier runs too, not only the newest of each loss and configuration.
        tool: the rows of this tool instead: "profile", "inference", "pipeline", "flops", "check".

    Raises ValueError where nothing is there.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    flags = ["--all-runs"] if all_runs else []
    rows = json.loads(_run("summarize", *map(str, paths), "--format", "json", *flags))
    wanted = [row for row in rows if row.get("tool", "") == tool]
    return Results(map(Row, wanted if tool else wanted or rows))


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
        flags: those of ``rnnt-bench run``, as preset="quick", rounds=3, passes="timing,memory".

    Raises ValueError for a loss that a process cannot import, and for flags that do not fit.
    """
    words = _words(
        {"passes": "timing,memory", **flags, "vocab_size": vocab_size, "loss": _target(loss)}
    )
    only = ["--only", ",".join(beside)] if beside else ["--skip", "all"]
    with tempfile.TemporaryDirectory(prefix="rnnt-bench-") as scratch:
        folder = str(log_dir or scratch)
        _run("run", *words, *only, "--quiet", "--log-dir", folder, allowed=(0, 1))
        return Results(sorted(load(folder), key=lambda row: row["name"] in beside))


def check(loss: Loss, **flags: Any) -> Check:
    """Ask a loss the corner cases of ``rnnt-bench check``.

    Args:
        loss: see `measure`.
        flags: those of ``rnnt-bench check``, as cases="ragged,no_targets", device="cuda".

    Raises ValueError for a loss that a process cannot import.
    """
    words = _words({**flags, "loss": _target(loss), "format": "json"})
    with tempfile.TemporaryDirectory(prefix="rnnt-bench-") as scratch:
        rows = json.loads(_run("check", *words, "--quiet", "--log-dir", scratch, allowed=(0, 1)))
    odd = [row for row in rows if row["result"] not in ("pass", "n/a")]
    findings = [
        ": ".join(filter(None, [row["case"], row["result"], row["message"]])) for row in odd
    ]
    return Check(not findings, findings, {row["case"]: row for row in rows if row["case"]})


def assert_is_transducer_loss(
    loss: Callable[..., Any], device: str = "cpu", dtype: str = "float32"
) -> None:
    """Raise AssertionError, with what is wrong, unless `loss` is the transducer loss: for tests.

    Loss and gradient are compared with a float64 oracle on small batches: ragged, without targets,
    of one frame, with sharp logits, and under an upstream gradient.

    Args:
        loss: ``loss(logits, targets, T_lengths, U_lengths)``, called in this process; a closure
          does too.
        device: "cpu" or "cuda".
        dtype: of the logits.
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
    """Return MODULE:FUNCTION or FILE.py:FUNCTION of a loss.  Raises ValueError."""
    if isinstance(loss, str):
        return loss
    module = getattr(loss, "__module__", None)
    name = getattr(loss, "__qualname__", "<")
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if module is None or "<" in name or (module == "__main__" and file is None):
        raise ValueError(
            f"{loss}: give a function at the top level of a module or script, which a process can import"
        )
    return f"{file}:{name}" if module == "__main__" else f"{module}:{name}"


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags as a command line has them: {"vocab_size": 500} is --vocab-size 500."""
    return [
        word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of rnnt-bench in a process of its own, with the folders from which this one
    imports."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    # Python adds its own folders itself.
    folders = [folder for folder in folders if not folder.startswith((sys.prefix, sys.base_prefix))]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(PACKAGE.parent), *folders])),
    }
    line = [sys.executable, "-m", "rnnt_bench", *arguments]
    return subprocess.run(
        line, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of stderr of a command."""
    return (done.stderr.strip().splitlines() or ["no output"])[-1]


def _run(*arguments: str, allowed: Sequence[int] = (0,)) -> str:
    """Run a command of rnnt-bench and return what it prints.  Raises ValueError with its last line
    of stderr where it ends with a code that is not `allowed`, or breaks."""
    done = command(*arguments)
    for line in done.stderr.splitlines():
        if line.startswith("warning: "):
            warnings.warn(line.removeprefix("warning: "), stacklevel=3)
    if done.returncode not in allowed or "Traceback (most recent call last)" in done.stderr:
        raise ValueError(last_line(done))
    return done.stdout
