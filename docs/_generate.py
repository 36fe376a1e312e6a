"""Make pages of the site from the code while `make docs` builds: a hook of MkDocs.

These pages are every flag, kind of record, and metric; README.md, CONTRIBUTING.md and CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import ast
import html
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
#: Commands with the flags of another, run.
LIKE_RUN = ("sweep",)


def on_files(files, config):
    sys.path.insert(0, str(ROOT))
    pages = {
        "index.md": _moved((ROOT / "README.md").read_text(encoding="utf-8")),
        "CONTRIBUTING.md": _moved((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")),
        "CHANGELOG.md": _moved((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")),
        "reference/flags.md": "\n".join(_flags()),
        "reference/records.md": "\n".join(_records()),
        "reference/metrics.md": "\n".join(_metrics()),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, **_):
    """Return the page with links to pages outside docs/ mended, and links to files of the repository taken out."""
    return re.sub(
        r"\]\(\.\./(CONTRIBUTING|CHANGELOG)\.md", r"](\1.md", _without_files(markdown, r"\.\./(?!CON|CHANGE)")
    )


def _moved(text: str) -> str:
    """Return a page of the top folder with its links as they are from docs/."""
    text = re.sub(r"(\]\(|src=\"|srcset=\")docs/", r"\1", text).replace("](README.md", "](index.md")
    return _without_files(text, r"(?![\w-]+\.(?:md|png|svg)[)#])(?![#\w]*:)(?!#)")


def _without_files(text: str, start: str) -> str:
    """Return the text without links to files of the repository, which the site does not have."""
    return re.sub(rf"(?<!!)\[([^\]\n]*)\]\({start}[^)\n]*\)", r"\1", text)


def _flags() -> Iterator[str]:
    yield "# Flags\n\nThe flags of every command, as in `--help`.\n"
    from rnnt_bench.command import COMMANDS

    for name, command in COMMANDS.items():
        if name not in LIKE_RUN:
            yield from _section(f"rnnt-bench {name}", import_module(command.module).parser())
    yield "\n## benchmark_&lt;implementation&gt;.py\n"
    yield "They take the flags of `rnnt-bench run` but `--only` and `--skip`, which only a template has.\n"
    yield "| script | measures |\n| --- | --- |"
    scripts = [*ROOT.glob("benchmark_*.py"), *ROOT.glob("losses/benchmark_*.py")]
    for path in sorted(scripts, key=lambda path: path.name):
        if path.name == "benchmark_all.py":
            continue
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield f"| `{path.relative_to(ROOT)}` | {_cell(text.partition(chr(10) * 2)[0])} |"


def _records() -> Iterator[str]:
    from rnnt_bench.records import schema

    describe = runpy.run_path(str(Path(__file__).with_name("_records.py")))["describe"]
    yield f"# Records\n\n{_paragraphs(schema.__doc__)}\n"
    shared = {field.name: field for field in describe()[0].fields if field.name in schema.Line.__struct_fields__}
    yield f"Of every kind of record, in a sweep:\n\n{_fields(shared.values())}"
    for kind in describe():
        yield f"\n## {kind.name}\n\n{_cell(kind.text)}\n"
        yield _fields(field for field in kind.fields if field.name not in shared)


def _fields(fields: Iterable[Any]) -> str:
    lines = ["| field | type | unit | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        kind = re.sub(r"\b([A-Z]\w+)", lambda part: f"[{part[1]}](#{part[1].lower()})", _cell(field.type))
        kind += "" if field.required else ", optional"
        lines.append(f"| `{field.name}` | {kind} | {_cell(field.unit)} | {_cell(field.text)} |")
    return "\n".join(lines) + "\n"


def _metrics() -> Iterator[str]:
    from rnnt_bench.analysis import metrics
    from rnnt_bench.tools.flops import show as flops
    from rnnt_bench.tools.inference import rows as inference
    from rnnt_bench.tools.pipelines import rows as pipelines
    from rnnt_bench.tools.profile import rows as profile

    yield f"# Metrics\n\n{_paragraphs(metrics.__doc__)}\n"
    yield "| key | title | unit | better | tables | scalar of TensorBoard |\n| --- | --- | --- | --- | --- | --- |"
    for metric in metrics.METRICS.values():
        tables = ", ".join(metric.tables.split())
        cells = (metric.title, metric.unit, metric.better, tables, metric.tag)
        yield f"| `{metric.key}` | {' | '.join(map(_cell, cells))} |"
    for script, numbers in {
        "rnnt-bench inference": inference.NUMBERS,
        "rnnt-bench pipelines": pipelines.NUMBERS,
        "rnnt-bench profile": profile.NUMBERS,
        "rnnt-bench flops": flops.NUMBERS,
        "rnnt-bench flops, by length": flops.BUCKETS,
    }.items():
        yield f"\n## {script}\n\n| key | title | unit | better |\n| --- | --- | --- | --- |"
        for metric in numbers:
            yield f"| `{metric.key}` | {' | '.join(map(_cell, (metric.title, metric.unit, metric.better)))} |"


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(_cell(paragraph) for paragraph in (text or "").strip().replace("``", "").split("\n\n"))


def _section(script: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"\n## {script}\n\n{_cell((parser.description or '').strip().partition(chr(10) * 2)[0])}\n"
    groups: dict[str, list[argparse.Action]] = {}
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if actions:
            groups.setdefault(group.title or "", []).extend(actions)
    for title, actions in groups.items():
        yield f"\n### {title} {{#{script.replace(' ', '-')}-{re.sub(r'[^a-z]+', '-', title.lower())}}}\n"
        yield "| flag | meaning |\n| --- | --- |"
        yield from (f"| {_flag(action)} | {_help(action)} |" for action in actions)
        yield ""


def _flag(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return f"`{value or action.dest}`"
    value = "" if action.nargs == 0 else value or action.dest.upper()
    return ", ".join(f"`{flag} {value}`".replace(" `", "`") for flag in action.option_strings).replace("|", "\\|")


def _help(action: argparse.Action) -> str:
    return _cell((action.help or "") % vars(action))


def _cell(text: str) -> str:
    """Return `text` escaped for a cell of a table."""
    return re.sub(r"([|*_`\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
