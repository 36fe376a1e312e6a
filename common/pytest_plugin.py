"""A pytest fixture that fails when a loss became slower than a saved baseline.

In conftest.py: ``pytest_plugins = ["rnnt_bench.pytest_plugin"]``.  In a test::

    def test_speed(not_slower):
        not_slower(my_loss, "baselines/my_loss", percent=10, vocab_size=500)

The first time it measures the baseline, leaves its log folder there and skips; remove the folder to
measure it anew. It skips as well, with the reason, where there is no verdict: too few rounds, other
load, another machine.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rnnt_bench import api
from rnnt_bench.core import files
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK

#: Held while a loss is measured, since tests that run at once would slow each other: of
#: pytest-xdist, say.
LOCK = Path(tempfile.gettempdir()) / "rnnt-bench-not-slower.lock"


@pytest.fixture
def not_slower(tmp_path: Path) -> Callable[..., None]:
    """Return a function that measures a loss and fails the test where it is surely slower than it
    was."""

    def check(
        loss: api.Loss,
        baseline: str | Path,
        percent: float = 5.0,
        strict: bool = False,
        **flags: Any,
    ) -> None:
        """Measure `loss`, and fail where the whole interval of a time is above the baseline's by
        `percent` %.

        Args:
            loss, flags: as of `rnnt_bench.measure`.
            baseline: the log folder of the measurement to compare with.
            percent: how much slower is no failure.
            strict: whether the test fails, instead of being skipped, where there is no verdict.
        """

        def no_verdict(reason: str) -> NoReturn:
            (pytest.fail if strict else pytest.skip)(reason)

        log = tmp_path / "log"
        with files.locked(LOCK, waiting=lambda: None):
            rows = api.measure(loss, log_dir=log, **{"passes": "timing", **flags})
        for row in rows:
            assert row["status"] == "ok", f"{row['name']}: {row['reason']}"
        if not Path(baseline).exists():
            kept = api.command("compare", "--save-baseline", "kept", str(log))
            if kept.returncode != EXIT_OK:
                no_verdict(api.last_line(kept))
            shutil.copytree(log / "baselines" / "kept", baseline)
            pytest.skip(f"{baseline} holds the baseline from now on")
        compared = api.command(
            "compare", str(baseline), str(log), "--fail-on-slower", f"{percent}%", "--strict"
        )
        if compared.returncode == EXIT_FAILED:
            pytest.fail(api.last_line(compared))
        if compared.returncode != EXIT_OK:
            no_verdict(api.last_line(compared))

    return check
