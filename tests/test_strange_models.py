"""Models, sizes and configurations that nobody should give, by the real commands: one clear line."""

from __future__ import annotations

import os

import pytest
from commands import assert_user_error, run

pytest.importorskip("torch")
pytest.importorskip("yaml")

MODELS = """
import torch

class Ends(torch.nn.Module):
    def forward(self, x):
        raise SystemExit(0)

class Cries(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("x\\x1b[2J" * 10**6)

class EndsEarly(torch.nn.Module):
    def __init__(self):
        raise SystemExit(0)
"""


@pytest.fixture
def counted(tmp_path):
    (tmp_path / "strange.py").write_text(MODELS)
    return lambda name, shape="1x2", *flags: run(
        "count_flops.py", f"{tmp_path}/strange.py:{name}", "--input-shape", shape, *flags
    )


@pytest.mark.parametrize(
    "name, words", [("Ends", "SystemExit"), ("EndsEarly", "cannot be made"), ("Cries", "RuntimeError")]
)
def test_a_model_that_ends_the_process_is_no_success(counted, name, words):
    done = counted(name)
    assert_user_error(done, words)
    assert len(done.stderr) < 5000 and "\x1b" not in done.stderr and not done.stdout


@pytest.mark.parametrize("shape", ["99999999999999999999x2", "9999999999x99999"])
def test_an_input_that_no_memory_holds(counted, shape):
    assert_user_error(counted("Ends", shape), shape, "smaller")


STRANGE = {"bytes": b"\xff\xfe\x00", "nested": b"[" * 10**5, "one that nobody writes": None}
READERS = {
    "count_flops.py": ["torch.nn:Linear", "--input-shape", "1x2", "--args"],
    "profile_model.py": ["--config"],
    "pipeline_metrics.py": ["--config"],
}


@pytest.mark.parametrize(
    "script, kind",
    [*(("count_flops.py", kind) for kind in STRANGE), *((name, [*STRANGE][-1]) for name in [*READERS][1:])],
)
def test_a_configuration_that_is_none(script, kind, tmp_path):
    path, content = tmp_path / "strange.yaml", STRANGE[kind]
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    assert_user_error(run(script, *READERS[script], path, timeout=60), path)
