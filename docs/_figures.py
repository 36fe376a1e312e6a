#!/usr/bin/env python3
"""Write what pages show of committed records, between their marks: `docs/_figures.py`.

`table of FOLDER`: the Markdown table of the losses to choose from; `screen of FOLDER`: what summarize.py prints; `use
of NAME`: how a joiner changes to a loss; `session of FOLDER`: the same below its command; `head of FOLDER`: its
heading and first table; `largest of FOLDER`: the table of rnnt-bench largest; `comparison of ARGUMENTS`: what compare
prints; `runs`: the folders of results/; `machines`: what each machine of results/ found; `lead`: how far fused is ahead
on each machine that ran `make bench`; `fused of FOLDER`: the table of docs/_fused_table.py; `fast-products of FOLDER`:
what a preloaded library brought; `sweep of FOLDER`: step ms by value of the swept setting; `logits of FOLDER`: the same
over kinds of logits, with what these are like; `windows of FOLDER`: the same over windows, with their cells and peaks;
`judged of FOLDER`: how far each loss is off at the measured size; `costs of FOLDER`: the seconds that each pass took;
`source of FILE`: the file.

A figure in a sentence stands between marks of its own, `<!-- = NAME FOLDER ... -->1.63x (1.47 to 1.80)<!-- / -->`; NAME
is a function of QUOTES.  A test compares pages and records.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from rnnt_bench.analysis import doubts, logs, verdict  # noqa: E402
from rnnt_bench.analysis import machines as machines_of  # noqa: E402
from rnnt_bench.analysis.groups import groups  # noqa: E402
from rnnt_bench.analysis.metrics import METRICS  # noqa: E402
from rnnt_bench.analysis.row import Row  # noqa: E402
from rnnt_bench.analysis.standing import Standing, stand  # noqa: E402
from rnnt_bench.cli import parser  # noqa: E402
from rnnt_bench.core import snippets  # noqa: E402
from rnnt_bench.core.implementations import BY_UTTERANCE, FAST_MKL, IMPLEMENTATIONS, find  # noqa: E402
from rnnt_bench.core.settings import FEWEST_IN_BUDGET, SETTINGS, TRACE, flag, resolve, worded  # noqa: E402
from rnnt_bench.core.text import count, escaped, number  # noqa: E402
from rnnt_bench.present.parts import Column  # noqa: E402
from rnnt_bench.present.text import markdown_of  # noqa: E402
from rnnt_bench.records import store  # noqa: E402
from rnnt_bench.records.schema import FILE_NAME, TOOL_FILE_NAME, FirstLine, Header, recorded  # noqa: E402
from rnnt_bench.show import tables  # noqa: E402
from rnnt_bench.tools import kept  # noqa: E402
from rnnt_bench.tools.largest import losses  # noqa: E402

import _fused_table as fused_table  # noqa: E402

#: End of a folder's name in results/ -> the script that made its runs; of others it is benchmark_all.py.
MADE_BY = {"fused-table": "docs/_fused_table.py"}
NAMES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("results", "machines", "reading", "comparing", "fused")),
    *(f"docs/{name}.md" for name in ("family", "gpu", "usage", "switching", "method")),
    "results/README.md",
)
PAGES = tuple(ROOT / name for name in NAMES)
BLOCK = re.compile(
    r"(<!-- ([a-z-]+)(?: of ([^\n]+))?, written by docs/_figures\.py -->\n).*?(<!-- end -->)", flags=re.DOTALL
)
GIB = 2**30
#: Rounds of a run that ask hard questions, one each (rnnt_bench.losses.passes.after_timing).
HARD_ROUNDS = 3
#: Ends of the folders of results/ that say nothing of a machine: settings that are no user's, another lattice.
NO_WORKLOAD = (
    *("before", "allocator", "threads", "largest", "fused-table", "logits", "tdt", "few-cells"),
    *("windows", "windowed"),
)
#: The losses that one can choose from: one of each family that a package brings, without controls and variants.
CHOICES = (
    *("fused", "optimized_transducer", "fast_rnnt", "k2", "warp-rnnt", "torchaudio", "fast_rnnt-pruned"),
    *(f"{row.name}:{BY_UTTERANCE}" for row in IMPLEMENTATIONS if row.by_utterance),
)


def table(folder: str) -> str:
    """Return a Markdown table of the losses that one can choose from, three digits of each figure."""
    rows = [row for name, row in _by_name(folder).items() if name in CHOICES]
    heads = ["step ms", "over the fastest", "95% interval", "loss alone ms", "peak MB", "gradient error"]
    shown = [metric for metric in METRICS.values() if metric.is_in("readme")]
    lines = [
        [_named(row), *(number(each.value(row), 3) if each.unit else each.shown(row) for each in shown[1:])]
        for row in rows
    ]
    made, every = markdown_of(["loss", *map(Column, heads)], lines), list(_by_name(folder).values())
    pick = verdict.fastest(every)
    products = verdict.products_answer(pick, every) if pick else ""
    sentences = [f"As a step over {pick.row.name}'s, {products}."] if pick and products else []
    return "\n\n".join([made, *sentences, f"This was {_dated(folder)}."])


def fast_products(folder: str) -> str:
    """Return the step of each loss with and without torch's products at the processor's rate; "" without such rows."""
    rows = _by_name(folder)
    both = [(row, rows.get(f"{name}@{FAST_MKL}")) for name, row in rows.items()]
    timed = [(row.name, row.median_ms("step"), fast.median_ms("step")) for row, fast in both if fast]
    parts = [f"{number(fast, 3)} ms for {name} ({number(slow, 3)} without)" for name, slow, fast in timed]
    first = next(iter(rows.values()))
    return f"On {first.device_name} a step takes {', '.join(parts)}." if parts else ""


def screen(folder: str) -> str:
    """Return a block of what summarize.py prints into a pipe."""
    log = logs.read([ROOT / folder])
    return f"```\n{tables.screen(log)}```"


def session(folder: str) -> str:
    """Return the same block below the command that was measured."""
    log = logs.read([ROOT / folder])
    first = next(row for row in [*log.rows, *log.swept])
    return screen(folder).replace("```\n", f"```\n{typed(command(first.header))}\n", 1)


def typed(words: str) -> str:
    """Return a command as a user types it, in lines of at most 98 characters."""
    kept = re.sub(r"(--\S+) (?!--)", "\\1\N{NO-BREAK SPACE}", f"$ {words}")
    lines = wrap(kept, tables.WIDTH - 2, subsequent_indent="      ", break_on_hyphens=False)
    return " \\\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


def use(name: str) -> str:
    """Return how to install a loss, and the change of a joiner with torchaudio's loss to it."""
    install, *new = snippets.SNIPPETS[name].splitlines()
    old = (snippets.JOINER + snippets.SNIPPETS["torchaudio"].partition("\n\n")[2]).splitlines()
    changed = [*(f"-{line}" for line in old), *(f"+{line}" for line in new if line)]
    return "\n".join(["```bash", install.lstrip("# "), "```", "", "```diff", *changed, "```"])


def head(folder: str) -> str:
    """Return the heading and the first table of the same block."""
    shown = "\n\n".join(screen(folder).rsplit("\n```", 1)[0].split("\n\n")[:2])
    return f"{shown}\n```\n\nThis was {_dated(folder)}."


def largest(folder: str) -> str:
    """Return a block of the table of rnnt-bench largest."""
    (path,) = (ROOT / folder).rglob(TOOL_FILE_NAME)
    run = kept.read(path)
    shown = losses.answer(run).render("table")
    typed_in = f"{typed(command(run.header))}\n" if run.header.config["type"] == "training" else ""
    day, machine = run.header.started[:10], machines_of.described(run.header.machine)
    return f"```\n{typed_in}{shown}```\n\nThis was measured on {day}, {machine}."


def source(path: str) -> str:
    """Return a block of a file of this repository."""
    return f"```python\n{(ROOT / path).read_text(encoding='utf-8')}```"


def _named(row: Row) -> str:
    """Return the name of a row, with its condition where that is not that of most rows: it is ranked among its own."""
    return METRICS["implementation"].shown(row) + (f", {row.other_torch}" if row.other_torch else "")


def _by_name(folder: str) -> dict[str, Row]:
    """Return the rows with status ok by their names."""
    (group,) = groups(logs.read([ROOT / folder]).rows)
    return {row.name: row for row in group if row.status == "ok"}


def comparison(arguments: str) -> str:
    """Return a block of what `rnnt-bench compare` prints, below its command."""
    compare = [sys.executable, "rnnt-bench", "compare", *arguments.split()]
    printed = subprocess.run(compare, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "\n".join(["```", typed(f"./rnnt-bench compare {arguments}"), printed.rstrip("\n"), "```"])


def runs() -> str:
    """Return a Markdown table with a row for each folder of results/."""
    lines = []
    for folder in sorted((ROOT / "results").iterdir(), reverse=True):
        if folder.is_dir():
            log = logs.read([folder], all_runs=True)
            headers: list[Any] = [row.header for row in [*log.rows, *log.swept]]
            headers += [kept.read(path).header for path in folder.rglob(TOOL_FILE_NAME)]
            machine = headers[0].machine
            hardware = f"{machines_of.described(machine)}, {(machine.memory_bytes or 0) / GIB:.0f} GiB"
            made_by = [f"`{script}`" for name, script in MADE_BY.items() if folder.name.endswith(f"-{name}")]
            commands = made_by or dict.fromkeys(f"`{command(header, headers)}`" for header in headers)
            revisions = dict.fromkeys((header.git_revision or "?")[:7] for header in headers)
            lines.append([f"`{folder.name}`", escaped(hardware), "; ".join(commands), ", ".join(revisions)])
    return markdown_of(["folder", "hardware", "command", "revision"], lines)


def _configurations() -> Iterator[tuple[str, list[Row]]]:
    """Yield (folder, rows with a step) of each configuration that results/ measured on a machine."""
    for folder in sorted((ROOT / "results").iterdir()):
        if folder.is_dir() and not folder.name.endswith(NO_WORKLOAD):
            log = logs.read([folder])
            cells: dict[str, list[Row]] = {}
            for row in log.swept:
                cells.setdefault(str(row.header.values), []).append(row)
            for measured in [*(group.rows for group in log.groups), *cells.values()]:
                yield folder.name, [row for row in measured if row.status == "ok" and row.step.ms]


def machines() -> str:
    """Return a Markdown table with a row for each machine and configuration of results/ where two exact losses were
    timed, those of one workload together."""
    rows = [_machine(folder, rows) for folder, rows in _configurations()]
    heads = ["workload", "machine", "fastest exact", "step ms", "next exact", "approximation", "torch"]
    return markdown_of(heads, sorted(filter(None, rows)))


def _workload(rows: Sequence[Row]) -> str:
    """Return the sizes of the first row, as "V 500, N 2, float32"; "" without a row."""
    if not rows:
        return ""
    settings = rows[0].configuration
    of = f"{settings['max_frames']} frames" if settings.get("sort_utterance") else f"N {settings['batch_size']}"
    made = (("T", settings.get("frames")), ("U", settings.get("tokens")))
    of += "".join(f", {name} {length}" for name, length in made if isinstance(length, int))
    return f"V {settings['vocab_size']}, {of}, {settings['dtype']}"


def _machine(folder: str, rows: Sequence[Row]) -> list[str]:
    """Return the cells of one configuration; [] where no two exact losses were timed."""
    pick, pruned = verdict.fastest(rows), verdict.fastest(rows, ("pruned",))
    if not pick or not pick.next:
        return []
    first = pick.row
    ratio = pick.next_ratio
    return [
        _workload([first]),
        f"[{_device(first)}](../results/{folder}), {first.header.started[:10]}",
        " or ".join(row.name for row in (first, *pick.rivals)),
        METRICS["step_ms"].shown(first),
        f"{pick.next.name}, {_times(ratio)}" if ratio else pick.next.name,
        " or ".join(row.name for row in (pruned.row, *pruned.rivals)) if pruned else "-",
        (first.environment.torch or "").partition("+")[0],
    ]


#: The workload of `make bench`.
BENCH = "V 500, N 2, float32"
#: The exact losses whose steps a table of leads sets beside fused's.
BESIDE = ("optimized_transducer", "fast_rnnt", "torchaudio")
#: Leads over the next exact loss that were measured on machines whose records are not here: (machine, loss, ratio, low,
#: high). Each stands until someone sends the records of such a machine.
QUOTED = (("an Intel processor, without records here", "optimized_transducer", 1.51, 1.41, 1.62),)


#: Of a run whose records have no rate of the suite's own products.
ABOVE = (
    "`!`: less than the shortest time that the rates of its run allow: torch's products, the only ones that it "
    "measured, are slow on this processor."
)


def lead() -> str:
    """Return how far fused is ahead of the exact losses on each machine that ran `make bench`: a sentence of what holds
    on all of them, and a Markdown table."""
    leads, lines, notes = [], [], []
    for folder, rows in _configurations():
        if _workload(rows[:1]) == BENCH:
            ahead = {row.name: row.against_fastest for row in rows if row.name in ("fused", *BESIDE)}
            first = ahead["fused"].row
            assert ahead["fused"].is_fastest, f"{folder}: fused is not the fastest, which the sentence says"
            controls = [control for name in BESIDE if (control := ahead[name].row.with_fast_products)]
            both = [ahead[name] for name in BESIDE], controls
            leads += [min(each.ratio.ratio for each in standings) for standings in both if standings]
            machine = f"{machines_of.machine_of(first)}, {first.header.started[:10]}"
            is_above = "above limit" in doubts.kinds(first) and first.rates.loop is None
            step = METRICS["step_ms"].shown(first) + (" !" if is_above else "")
            notes += [ABOVE] if is_above else []
            lines.append([machine, step, *(_both_times(ahead[name]) for name in BESIDE)])
    for machine, loss, *quoted in QUOTED:
        leads.append(quoted[0])
        lines.append([machine, "-", *(_times(Span(*quoted)) if loss == name else "-" for name in BESIDE)])
    sentence = f"In each of {len(lines)} runs **fused** has the fastest exact step. The next loss takes "
    sentence += f"{min(leads):.2f} to {max(leads):.2f} times as long:"
    heads = ["machine", *map(Column, ("fused, step ms", *BESIDE))]
    return "\n\n".join([sentence, markdown_of(heads, lines), *dict.fromkeys(notes)])


class Span(NamedTuple):
    ratio: float
    low: float
    high: float


def _both_times(standing: Standing) -> str:
    """Return the ratio, and that of its control where there is one."""
    control = standing.row.with_fast_products
    here = _times(standing.ratio)
    return f"{here}; with torch's products at the processor's rate {_times(control.ratio)}" if control else here


def _times(of: Any) -> str:
    return f"{of.ratio:.2f}x" + (f" ({of.low:.2f} to {of.high:.2f})" if of.low else "")


def command(header: FirstLine, of_folder: Sequence[Header] = ()) -> str:
    """Return the command of a run without its log folder; of a run that was sent, which has none, one of the same
    settings. of_folder: the headers of its folder."""
    words: list[str] = []
    for word in map(str, header.command or ["benchmark_all.py", *_flags(of_folder or [header])]):
        if words and words[-1] == "--log-dir":
            words.pop()
        else:
            words.append(word)
    return " ".join([f"./{Path(words[0]).name}", *words[1:]])


def _flags(headers: Sequence[Header]) -> list[str]:
    """Return flags that measure again what these runs of one folder did."""
    values, names = headers[0].settings, list(dict.fromkeys(header.name for header in headers))
    grid = {key: dict.fromkeys(str(header.values[key]) for header in headers) for key in headers[0].values}
    usual = recorded(resolve({"preset": values.preset}, values.device))
    flags = [] if len(names) > len(parser.standard()) // 2 else ["--only", ",".join(names)]
    for key, setting in SETTINGS.items():
        if key in grid:
            flags += ["--sweep", f"{flag(key)}={','.join(grid[key])}"]
        elif setting.group != TRACE and key not in ("preset", "budget"):
            is_long = key == "rounds" and usual.budget and not grid and not values.budget
            value = getattr(values, key)
            if value is not None and (value != getattr(usual, key) or is_long):
                flags += [setting.flag, worded(tuple(value) if isinstance(value, list) else value)]
    return flags


def fused(folder: str) -> str:
    """Return a Markdown table of fused beside the best other exact loss."""
    return fused_table.render(ROOT / folder)


def judged(folder: str) -> str:
    """Return a Markdown table of how far each loss of a run is off on the measured batch that was judged."""
    lines = []
    for row in logs.read([ROOT / folder]).rows:
        size = row.checked.at_size
        if size is not None:
            errors = f"{size.loss_error:.1e}", f"{size.grad_error:.1e}", f"{size.grad_tolerance:.1e}"
            lines.append([row.name, row.environment.implementation_version, *errors])
    heads = ["loss", "version", *map(Column, ("loss off by", "gradient off by", "allowed"))]
    return markdown_of(heads, lines)


def _swept(folder: str) -> tuple[str, dict[str, dict[str, Row]]]:
    """Return the setting that a sweep varies, and its rows by value and name."""
    (swept,) = logs.read([ROOT / folder]).sweeps
    ((key, _),) = swept.grid.items()
    by_value: dict[str, dict[str, Row]] = {}
    for row in swept.rows:
        if row.status == "ok":
            by_value.setdefault(str(row.header.values[key]), {})[row.name] = row
    return key, by_value


def sweep(folder: str) -> str:
    """Return a Markdown table of a sweep: each loss's step in ms, by value."""
    key, by_value = _swept(folder)
    names = [name for name in CHOICES if any(name in rows for rows in by_value.values())]
    lines = [[value, *_steps(rows, names)] for value, rows in by_value.items()]
    return f"{markdown_of([key.replace('_', ' '), *map(Column, names)], lines)}\n\nThis was {_dated(folder)}."


def _steps(rows: dict[str, Row], names: Sequence[str]) -> list[str]:
    return [number(rows[name].median_ms("step"), 3) if name in rows else "-" for name in names]


def few_cells(folder: str) -> str:
    """Return a Markdown table of a sweep over vocabularies and frames of one utterance: how many times fused's step the
    fastest other exact loss takes, and how many times fused's peak the smallest."""
    (swept,) = logs.read([ROOT / folder]).sweeps
    lines: dict[int, dict[str, str]] = {}
    for values, rows in swept.cells():
        timed = {row.name: row for row in rows if row.status == "ok" and row.kind == "exact"}
        own = timed.pop("fused")
        nearest = min((stand(row, own, "step").ratio for row in timed.values()), key=lambda over: over.ratio)
        peak = min(row.peak_mb for row in timed.values()) / own.peak_mb
        line = lines.setdefault(own.batches[0].useful_cells, {})
        line[f"V {values['vocab_size']:,}"] = f"{_times(nearest)}, {peak:.2f}x"
    heads = ["cells", *map(Column, next(iter(lines.values())))]
    body = [[f"{cells:,}", *line.values()] for cells, line in lines.items()]
    return f"{markdown_of(heads, body)}\n\nThis was {_dated(folder)}."


def windows(folder: str) -> str:
    """Return a Markdown table of a sweep over windows: what is left of the cells, and the time and peak of a step."""
    key, by_value = _swept(folder)
    rows = sorted((int(value), row) for value, of_value in by_value.items() for row in of_value.values())
    settings, whole = rows[-1][1].header.settings, rows[-1][1].median_ms("step")
    T, U = settings.frames, settings.tokens
    lines = []
    for window, row in reversed(rows):
        cells, ms = _cells(T, U, window), row.median_ms("step")
        shares = (f"1 / {T * (U + 1) / cells:.1f}", f"1 / {whole / ms:.1f}")
        lines.append([str(window), f"{cells:,}", shares[0], number(ms, 4), shares[1], f"{row.peak_mb:.2f}"])
    heads = [key, *map(Column, ("cells of an utterance", "share", "step ms", "share of the time", "peak MB"))]
    return f"{markdown_of(heads, lines)}\n\nThis was {_dated(folder)}."


def _cells(T: int, U: int, window: int) -> int:
    """Return the cells of an utterance that paths within the windows of `--topology windowed` pass."""
    import torch  # takes longer than a page
    from rnnt_bench.losses.topologies import TOPOLOGIES

    topology: Any = replace(TOPOLOGIES["windowed"], window=window)
    first, last = topology.windows(torch.tensor(T), torch.tensor(U), U).T.tolist()
    return sum(end - begin + 1 for begin, end in zip([0, *first], [*last, T - 1]))


def logits(folder: str) -> str:
    """Return a Markdown table of a sweep over kinds of logits: each loss's step, and what the logits are like."""
    _, by_kind = _swept(folder)
    names = [name for name in CHOICES if any(name in rows for rows in by_kind.values())]
    lines = []
    for kind, rows in by_kind.items():
        judged = [row.checked.at_size for row in rows.values() if row.kind == "exact" and row.checked.at_size]
        shares = [size.needed_cells / size.useful_cells for size in judged if size.needed_cells is not None]
        known = [row.checked.approximation_gap for row in rows.values()]
        gaps = [abs(gap) for gap in known if gap is not None]
        needed, gap = (f"{100 * values[0]:.2f}%" if values else "-" for values in (shares, gaps))
        lines.append([kind, needed, *_steps(rows, names), gap])
    heads = ["logits", *map(Column, ["cells needed", *(f"{name} ms" for name in names), "pruned gap"])]
    return f"{markdown_of(heads, lines)}\n\nThis was {_dated(folder)}."


def _dated(folder: str) -> str:
    """Return when, where and of which fused the runs of a folder are."""
    log = logs.read([ROOT / folder])
    rows = [row for row in [*log.rows, *log.swept] if row.status == "ok"]
    version = next((row.environment.implementation_version for row in rows if row.loss == "fused"), "")
    of = f", fused {version}" if version else ""
    rounds = count(max(row.rounds for row in rows), "round")
    return f"measured on {rows[0].header.started[:10]}, {_device(rows[0])}: {rounds}{of}"


def _device(row: Row) -> str:
    """Return the name of what a row was measured on: the GPU, or the machine."""
    return machines_of.machine_of(row) if row.device == "cpu" else str(row.environment.device_name)


# Figures in sentences.


def _rows(folder: str, value: str = "") -> dict[str, Row]:
    """Return the rows with status ok by their names; of a sweep those at `value`."""
    return _swept(folder)[1][value] if value else _by_name(folder)


def _lead(folder: str, value: str = "") -> str:
    """Return by how many times the next exact loss is slower than the fastest, "1.63x (1.47 to 1.80)"."""
    pick = verdict.fastest(list(_rows(folder, value).values()))
    assert pick and pick.next_ratio and pick.row.name == "fused", f"{folder}: a page says that fused leads"
    return _times(pick.next_ratio)


def _over(folder: str, name: str, other: str, value: str = "") -> str:
    """Return a loss's step over another's."""
    rows = _rows(folder, value)
    return _times(stand(rows[name], rows[other], "step").ratio)


def _across(folder: str, name: str, value: str, other: str) -> str:
    """Return a loss's step at a value of a sweep over that at another value."""
    return _times(stand(_rows(folder, value)[name], _rows(folder, other)[name], "step").ratio)


def _step(folder: str, name: str, value: str = "") -> str:
    return f"{number(_rows(folder, value)[name].median_ms('step'), 3)} ms"


def _peak(folder: str, name: str) -> str:
    return f"{_by_name(folder)[name].peak_mb:.0f} MB"


def _others(folder: str) -> str:
    """Return the peaks of the other exact losses that one can choose from, "497 to 974", and the least of those on an
    utterance at a time, where the run has them."""
    rows = [row for name, row in _by_name(folder).items() if name in CHOICES and name != "fused"]
    peaks = [row.peak_mb for row in rows if row.kind == "exact" and not row.other_torch]
    pieces = [row.peak_mb for row in _by_name(folder).values() if row.kind == BY_UTTERANCE and row.peak_mb]
    of_pieces = f", or {min(pieces):.0f} an utterance at a time" if pieces else ""
    return f"{min(peaks):.0f} to {max(peaks):.0f}{of_pieces}"


def _gap(folder: str, name: str, value: str = "") -> str:
    """Return how far an approximate loss is off, "3%"."""
    return f"{100 * (_rows(folder, value)[name].gap or 0):.0f}%"


def costs(folder: str) -> str:
    """Return a table of the seconds that the jobs of a run took, by pass, and of a run of the fewest rounds."""
    seconds: dict[str, dict[bool, float]] = defaultdict(lambda: defaultdict(float))
    for path in store.files_named(FILE_NAME, ROOT / folder):
        header, lines = store.read_run(path.parent)
        for job in store.latest_jobs(lines).values():
            end = store.status_of(job)
            if end and end.status == "ok" and (end.round or 0) <= FEWEST_IN_BUDGET:
                rounds = f"1 to {HARD_ROUNDS}" if (end.round or 0) <= HARD_ROUNDS else "after these"
                name = f"timing, rounds {rounds}" if end.round else end.pass_name or ""
                seconds[name][bool(find(header.name).same_as)] += (end.wall_ns or 0) / 1e9
    total = {same: sum(of[same] for of in seconds.values()) for same in (False, True)}
    seconds[f"all, {FEWEST_IN_BUDGET} rounds"].update(total)
    lines = [
        [name, *(f"{took:.0f}" for took in (of[False], of[True], sum(of.values())))] for name, of in seconds.items()
    ]
    return markdown_of(["pass", "losses, s", "rows of the same code, s", "sum, s"], lines)


def _bought(folder: str) -> str:
    """Return what the memory of a loss buys in a whole training, by the largest batches of each bucket."""
    (path,) = (ROOT / folder).rglob(TOOL_FILE_NAME)
    run = kept.read(path)
    config, ratios = run.header.config, "; ".join(losses.answer(run).total)
    limit = config["limit"].rpartition(" ")[2]
    return f"In a whole training within {limit} ({config['model'].partition(':')[0]}), {ratios}, by bucket of lengths."


def _measured(folder: str) -> str:
    """Return the day, the machine, rounds and batches of a run."""
    row = next(iter(_by_name(folder).values()))
    batches = f"{count(row.rounds, 'round')} of {row.header.settings.num_batches} random batches of"
    utterances = count(row.header.settings.batch_size, "utterance")
    return f"on {row.header.started[:10]}, {_device(row)}: {batches} {utterances}"


QUOTE = re.compile(r"(<!-- = ([^>]+) -->)[^<]*(<!-- / -->)")
QUOTES: dict[str, Callable[..., str]] = {
    quote.__name__.strip("_"): quote
    for quote in (_lead, _over, _across, _step, _peak, _others, _gap, _bought, _measured, _dated)
}


WRITERS: dict[str, Callable[..., str]] = {
    writer.__name__.replace("_", "-"): writer
    for writer in (
        *(table, fast_products, use, screen, session, head, largest, comparison, runs, machines, lead, fused, logits),
        *(sweep, judged, few_cells, windows, costs, source),
    )
}


def written(page: str) -> str:
    """Return the page with each block made anew from the records; one of a folder that is not there stays as it is."""

    def anew(block: re.Match[str]) -> str:
        folder = (block[3] or "").split()
        if folder and folder[0].startswith("results/") and not (ROOT / folder[0]).is_dir():
            return block[0]
        return f"{block[1]}{WRITERS[block[2]](*filter(None, [block[3]]))}\n{block[4]}"

    def quoted(figure: re.Match[str]) -> str:
        name, folder, *words = figure[2].split()
        return f"{figure[1]}{QUOTES[name](folder, *words)}{figure[3]}" if (ROOT / folder).is_dir() else figure[0]

    return QUOTE.sub(quoted, BLOCK.sub(anew, page))


def write() -> None:
    """Write all pages anew, but for pictures (see _screens.py)."""
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write()
