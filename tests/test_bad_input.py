"""What users get wrong: a flag, a file, YAML.  One clear line with the thing and the value, exit code 2, at once."""

from __future__ import annotations

import os

import pytest
from commands import assert_user_error, run
from fixtures_runs import write_run

from common.core.errors import UserError
from common.tools import configuration

pytest.importorskip("torch")

#: Files of the folder {}, by name.
FILES = {
    "nonsense.pt": "no tensor",
    "benchmark_broken.py": "def nothing_of_that_kind(:",
    "twice.yaml": "general: {a: 1, a: 2}\n",
    "code.yaml": "general: !!python/object/apply:os.system ['true']\n",
    "list.yaml": "- 1\n",
    "nonsense.jsonl": "{\n",
}
MEASURE = "benchmark_torchaudio.py --in-place --device cpu"
#: A command line, and words of its one line on stderr.
BAD_INPUTS = [
    (f"{MEASURE} --rounds none", "--rounds whole number none"),
    (f"{MEASURE} --rounds 1000000000", "--rounds at most 10000"),
    (f"{MEASURE} --memory-limit 1e308GiB", "--memory-limit at most"),
    (f"{MEASURE} --memory-limit 4GiB", "--memory-limit only applies --find-largest"),
    (f"{MEASURE} --tf32 true", "--tf32 needs CUDA"),
    (f"{MEASURE} --device cuda:³", "--device cuda:N"),
    (f"{MEASURE} --dtype int8", "--dtype int8 float32"),
    (f"{MEASURE} --preset quik", "--preset quik did you mean quick"),
    (f"{MEASURE} --schedule wait=1", "--schedule warmup not given"),
    (f"{MEASURE} --sweep batch-size=1,99999999999", "batch-size at most 2147483647"),
    (f"{MEASURE} --shape-file {{}}/nowhere.pt", "{}/nowhere.pt no such file"),
    (f"{MEASURE} --shape-file {{}}/nonsense.pt --quiet", "{}/nonsense.pt"),
    (f"{MEASURE} --shape-file {{}}/pipe", "{}/pipe not a file"),
    (f"{MEASURE} --log-dir {{}}/nonsense.pt", "--log-dir {}/nonsense.pt"),
    (f"{MEASURE} --log-dir {{}}/dangling/log", "--log-dir {}/dangling"),
    (f"{MEASURE} --log-dir {{}}/empty --resume", "--resume no run"),
    ("benchmark_all.py --only torchaudo", "torchaudo"),
    ("benchmark_all.py --only {}/benchmark_flush.py", "benchmark_flush.py no such file"),
    ("benchmark_all.py --only {}/benchmark_broken.py", "benchmark_broken.py line 1 not Python"),
    ("benchmark_all.py --only summarize.py", "summarize.py no ADAPTER"),
    ("summarize.py {}/nowhere", "{}/nowhere no such file or folder"),
    ("rnnt-bench report {}/log --output {}/empty", "cannot write {}/empty --output"),
    ("rnnt-bench compare {}/log {}/nowhere", "{}/nowhere no such"),
    ("rnnt-bench shapes --manifest {}/nonsense.jsonl --bpe-vocab-size 9 --output {}/s.pt", "{}/nonsense.jsonl"),
    ("rnnt-bench inference {}/code.yaml", "{}/code.yaml plain data"),
    ("rnnt-bench pipelines --config {}/twice.yaml", "{}/twice.yaml given twice"),
    ("rnnt-bench flops torch.nn:Linear --input-shape 1x2 --args {}/code.yaml", "{}/code.yaml plain data"),
    ("rnnt-bench profile --config {}/list.yaml", "{}/list.yaml"),
    ("rnnt-bench check --cases nothing", "nothing ragged"),
    ("rnnt-bench chekc", "chekc did you mean check"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    write_run(folder / "log" / "a")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    (folder / "dangling").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("line, words", BAD_INPUTS, ids=[line for line, _ in BAD_INPUTS])
def test_it_is_one_clear_line(line, words, folder):
    before = sorted(folder.rglob("*"))
    done = run(*line.format(folder, folder).split(), timeout=60)
    done.stderr = "\n".join(told for told in done.stderr.splitlines() if not told.startswith("measuring "))
    assert_user_error(done, *words.format(folder).split())
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: 1\ngeneral: !!bool maybe\n", ["plain data"]),
        ("a: 2026-13-41\n", ["plain data"]),
        ("a: {b: 1, b: 2}\n", ["'b' is given twice", "line 1"]),
        ("? [a, b]\n: 1\n", ["plain data"]),
        ("a: [1\n", ["plain data", "line"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_yaml_is_plain_data_or_one_line(text, words):
    with pytest.raises(UserError) as raised:
        configuration.parsed(text, "x.yaml")
    message = str(raised.value)
    assert message.startswith("x.yaml") and "\n" not in message and all(word in message for word in words)


def test_yaml_that_is_taken():
    assert configuration.parsed("a: [1, 2.5, true, null]\nb: {c: 'x'}\n", "x") == {
        "a": [1, 2.5, True, None],
        "b": {"c": "x"},
    }
    assert configuration.parsed("", "x") is None
