"""README, docs/, CONTRIBUTING and CHANGELOG: links lead somewhere, the diffs apply and work, the site builds."""

from __future__ import annotations

import csv
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rnnt_bench.analysis import logs, verdict
from rnnt_bench.analysis.groups import groups
from rnnt_bench.command import COMMANDS

from commands import run
from fixtures_runs import SETTINGS, change, timed

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("log/*.md")])
MKDOCS, SHELLCHECK = (ROOT / ".venv" / "dev" / "bin" / name for name in ("mkdocs", "shellcheck"))


def prose(page: Path) -> str:
    """Return the text of `page` without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of `page`."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_are_there(page):
    text = re.sub(r"`[^`\n]*`", "code", prose(page))
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"", text)
    broken = []
    for link in (link for link in map("".join, links) if not re.match(r"[a-z]+:", link)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


#: What begins a line of a page, and the command of rnnt-bench whose flags it takes.
SCRIPTS = {"summarize.py": "summarize", "generate_shape_info.py": "shapes"}


def commands_of(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of rnnt-bench on a page, in blocks and in sentences, each with its flags."""
    text = re.sub(r"\\\n *", "", page.read_text(encoding="utf-8"))
    lines = re.findall(r"^(?:\$ |[A-Z_0-9]+=\S+ )*([\w./]*(?:rnnt-bench|\.py) .+)$", text, flags=re.MULTILINE)
    commands = []
    for line in [*lines, *re.findall(r"`([\w./]*(?:rnnt-bench|\.py) [^`]+)`", text)]:
        program, *words = re.split(r" #|\|(?!-)|;|&&", line)[0].split()
        name = Path(program).name
        command = words.pop(0) if name == "rnnt-bench" else SCRIPTS.get(name, "run")
        if not command.startswith("-") and (name in ("rnnt-bench", *SCRIPTS) or name.startswith("benchmark_")):
            commands.append((command, [word.split("=")[0] for word in words if word.startswith("--")]))
    return commands


def test_every_command_of_a_page_has_the_flags_that_the_page_gives_it():
    pages = {page: commands_of(page) for page in PAGES if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")}
    unknown = []
    for page, commands in pages.items():
        for name, flags in commands:
            known = importlib.import_module(COMMANDS[name].module).parser()._option_string_actions
            unknown += [f"{page.name}: {name} {flag}" for flag in flags if flag not in {*known, "--list"}]
    assert not unknown and sum(map(len, pages.values())) > 80


@pytest.fixture(scope="module")
def diffs() -> dict[str, str]:
    """The diffs of CONTRIBUTING.md, by the heading that they are under."""
    parts = re.split(r"^## (.+)$", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    blocks = [re.findall(r"^```diff\n(.*?)^```", text, flags=re.M | re.S) for text in parts[2::2]]
    return {title: "".join(texts) for title, texts in zip(parts[1::2], blocks)}


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the scripts and of common/, with the environments of this checkout."""
    folder = tmp_path / "checkout"
    for name in ("common", "losses"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "rnnt_bench").symlink_to("common")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("shape_info.*"), ROOT / "rnnt-bench"]:
        shutil.copy(path, folder)
    return folder


def apply(diff: str, folder: Path) -> None:
    """Apply a diff of CONTRIBUTING, whose hunks may have no context below: an entry added there is no conflict."""
    subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=folder, input=diff, text=True, check=True)


def test_the_loss_of_contributing_is_a_row_that_is_right(diffs, checkout, tmp_path):
    pytest.importorskip("torchaudio")
    apply(diffs["Add a loss"], checkout)
    flags = ["--preset", "quick", "--passes", "correctness", "--in-place", "--log-dir", tmp_path / "log", "--quiet"]
    done = run(checkout / "losses" / "benchmark_rnntloss.py", *flags, cwd=checkout)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(run(checkout / "summarize.py", tmp_path / "log", "--format", "json", cwd=checkout).stdout)
    assert row["name"] == "rnntloss" and row["status"] == "ok" and row["loss_error"] < 1e-5


def test_the_lattice_of_contributing_is_a_row_of_the_reference(diffs, checkout, tmp_path):
    apply(diffs["Add a lattice"], checkout)
    flags = ["--preset", "quick", "--passes", "correctness", "--in-place", "--log-dir", tmp_path / "log", "--quiet"]
    done = run(checkout / "benchmark_all.py", "--topology", "skips", *flags, cwd=checkout)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(run(checkout / "summarize.py", tmp_path / "log", "--format", "json", cwd=checkout).stdout)
    assert row["name"] == "reference:skips" and row["kind"] == "skips" and row["loss_error"] < 1e-5


def test_the_tool_of_contributing_measures_and_is_in_the_summary(diffs, checkout, tmp_path):
    apply(diffs["Add a tool"], checkout)
    flags = ["--log-dir", tmp_path / "log", "--quiet"]
    done = run(checkout / "rnnt-bench", "imports", "json", "nowhere_at_all", *flags, cwd=checkout)
    assert done.returncode == 1 and "nowhere_at_all" in done.stdout, done.stderr
    rows = json.loads(run(checkout / "summarize.py", tmp_path / "log", "--format", "json", cwd=checkout).stdout)
    assert [row["module"] for row in rows] == ["json"] and rows[0]["ms"] > 0 and rows[0]["tool"] == "imports"


def test_the_metric_of_contributing_is_where_it_is_promised(diffs, checkout):
    apply(diffs["Add a metric"], checkout)
    measured = min((ROOT / "results").rglob("torchaudio*/results.jsonl")).parent
    line = (checkout / "summarize.py", measured, "--format")
    shown, text, table = (run(*line, how, cwd=checkout).stdout for how in ("markdown", "json", "csv"))
    (row,) = json.loads(text)
    assert "steps /s" in shown and row["steps_per_second"] == pytest.approx(1000 / row["step_ms"])
    (in_csv,) = csv.DictReader(table.splitlines())
    assert float(in_csv["steps_per_second"]) == pytest.approx(row["steps_per_second"])


@pytest.mark.thorough
def test_the_site_builds_and_asks_for_nothing_from_the_net(tmp_path):
    if not MKDOCS.exists():
        pytest.skip("no dev environment: make setup ENVIRONMENTS=dev")
    build = [MKDOCS, "build", "--config-file", ".ci/mkdocs.yml", "--strict", "--quiet", "--site-dir", tmp_path]
    subprocess.run(build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert "utterances_per_second" in pages["metrics.html"] and "total_wall_ns" in pages["records.html"]
    assert "--largest-cap" in pages["flags.html"] and "--fail-on-slower" in pages["flags.html"]
    for name, text in pages.items():
        assert not re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?(?:https?:)?//[^\">]*", text), name


def test_results_take_the_place_of_those_that_git_has_and_of_no_others(tmp_path):
    results, submit = importlib.import_module("docs._results"), importlib.import_module("rnnt_bench.tools.submit")
    folder, git = tmp_path / "results" / "run", ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    folder.mkdir(parents=True)
    (folder / "file").write_text("1")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert not results.is_committed(folder)
    for command in (["add", "results"], ["commit", "-q", "-m", "results"]):
        subprocess.run([*git, *command], cwd=tmp_path, check=True)
    assert results.is_committed(folder)
    for name, text in (("file", "2"), ("mine", "3")):
        before = (folder / "file").read_text()
        (folder / name).write_text(text)
        assert not results.is_committed(folder)
        (folder / "file").write_text(before)
    with pytest.raises(OSError):
        submit.write([], folder)
    submit.write([], folder, replaces=True)
    assert not any(folder.iterdir()) and [path.name for path in folder.parent.iterdir()] == ["run"]


@pytest.mark.thorough
def test_pages_have_what_the_records_say():
    """If this fails, run docs/_figures.py."""
    figures = runpy.run_path(str(ROOT / "docs" / "_figures.py"))
    pages = {path: path.read_text(encoding="utf-8") for path in figures["PAGES"]}
    assert sum(len(figures["BLOCK"].findall(page)) for page in pages.values()) >= 9
    assert {path: figures["written"](page) for path, page in pages.items()} == pages


PROGRAMS = [
    path
    for pattern in ("docs/*.py", "examples/*.py", "data/vectors/*.py", "tests/answers.py", "tests/mutants.py")
    for path in sorted(ROOT.glob(pattern))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_program_of_a_page_says_what_it_does_and_does_nothing_yet(path, monkeypatch, capsys):
    if "finetune" in path.name:
        pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert not ended.value.code and "usage: " in capsys.readouterr().out


def test_the_sbatch_script_sets_up_and_hands_its_end_on(tmp_path):
    """Run the script of docs/clusters.md as Slurm would, with another make and Python in the place of ours."""
    page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
    script = re.search(r"^```bash\n(#!/bin/bash\n.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1]
    assert "#SBATCH --signal=B:TERM@" in script
    (tmp_path / "job.sh").write_text(script)
    checked = [str(SHELLCHECK), "job.sh"] if SHELLCHECK.exists() else ["bash", "-n", "job.sh"]
    assert subprocess.run(checked, cwd=tmp_path).returncode == 0
    bodies = {"make": 'echo make "$@"', ".venv/main/bin/python": 'echo python "$@"; kill -TERM $$; echo lived'}
    for name, body in bodies.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "losses"}
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **slurm}
    for flags in ("", " --resume"):  # then submitted again
        done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
        assert done.returncode == -15  # the process that Slurm signals is the benchmark itself
        assert done.stdout.splitlines() == ["make setup", f"python benchmark_all.py --log-dir log/losses{flags}"]
        (tmp_path / "log" / "losses").mkdir(parents=True, exist_ok=True)


def test_a_sent_run_has_the_command_that_measures_it_again():
    page = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    lines = {name: line for line in page.splitlines() if (name := line.partition("`")[2].partition("`")[0])}
    wanted = {"-v1024": "--vocab-size 1024", "-v4096": "--vocab-size 4096", "-short": "--sweep vocab-size=500,1000"}
    for end, flags in wanted.items():
        found = [line for name, line in lines.items() if name.endswith(end)]
        assert found and all(flags in line for line in found), end


def test_ratios_in_sentences_have_their_intervals_and_tables_their_day():
    for name in ("README.md", "docs/results.md"):
        page = (ROOT / name).read_text(encoding="utf-8")
        quotes = re.findall(r"<!-- = (?:lead|over|across) [^>]+ -->([^<]*)<!-- / -->", page)
        assert len(quotes) >= 5 and all(re.fullmatch(r"[\d.]+x \([\d.]+ to [\d.]+\)", quote) for quote in quotes)
        tables = re.findall(r"<!-- (?:table|sweep|logits|head) of [^>]+ -->\n(.+?)<!-- end -->", page, flags=re.DOTALL)
        assert tables and all(re.search(r"This was measured on \d{4}-\d\d-\d\d, ", table) for table in tables)


def test_leads_are_of_each_machine_and_without_slow_products_too(tmp_path, monkeypatch):
    """Two machines of one name: on the second a control takes torch's slow products out."""
    figures = importlib.import_module("docs._figures")
    losses = {"fused": 10, "optimized_transducer": 20, "fast_rnnt": 30, "torchaudio": 40}
    controls = {"fused@fast-mkl": 10, "optimized_transducer@fast-mkl": 14}
    settings = {**SETTINGS, "batch_size": 2, "rounds": 3}
    for family, rows in ((25, losses), (26, {**losses, **controls, "optimized_transducer": 32})):
        head = {"run_id": f"{family}", "machine": {"cpu": "EPYC", "family": family}, "settings": settings}
        for name, ms in rows.items():
            timed(tmp_path / "results" / f"{family}", name, [ms] * 3, **head)
            is_control = name in controls
            change(tmp_path / "results" / f"{family}" / name, "environment", mkl_as_intel=is_control)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "QUOTED", [("an Intel processor", "optimized_transducer", 1.51, 1.41, 1.62)])
    sentence, _, table = figures.lead().partition("\n\n")
    assert "3 runs" in sentence and "1.40 to 3.00 times" in sentence
    first, second, quoted = table.splitlines()[2:]
    assert "family 25" in first and "2.00x" in first and "3.00x" in first and "4.00x" in first
    assert "family 26" in second and "3.20x" in second and "rate 1.40x" in second
    assert "1.51x (1.41 to 1.62)" in quoted


def test_the_pick_of_the_readme_is_that_of_its_records():
    """The names, and the figures that are beside them, of the lines above the table."""
    page = re.sub(r"\s*<!-- = [^>]+ -->", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    pick, _, folder = page.replace("<!-- / -->", "").partition("**The pick")[2].partition("<!-- table of ")
    (group,) = groups(logs.read([ROOT / folder.split(",")[0]]).rows)
    (quick, _, small, pruned), rows = verdict.picks(group), {row.name: row for row in group}
    assert f"Exact: **{quick.row.name}**" in pick and quick.row == small.row
    assert f"If an approximation will do: **{pruned.row.name}**" in pick
    names = ("optimized_transducer", "fast_rnnt", "torchaudio")
    here = [rows[name].against_fastest.ratio for name in names]
    for ratio in here:  # in its machine's line of the leads
        assert f" | {ratio.ratio:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})" in pick
    lines = [line for line in pick.splitlines() if line.startswith("|")]
    nearest = [min(map(float, found)) for line in lines if (found := re.findall(r"\| ([\d.]+)x \(", line))]
    least = min(float(ratio) for line in lines for ratio in re.findall(r"([\d.]+)x \(", line))
    assert len(nearest) >= 3 and f"{least:.2f} to {max(nearest):.2f} times" in pick
    assert re.findall(r"(\d+) MB", pick) == [f"{row.peak_mb:.0f}" for row in (quick.row, pruned.row)]
    assert re.findall(r"(\d+)% off", pick) == [f"{100 * pruned.row.gap:.0f}"]
