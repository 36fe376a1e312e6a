"""Define a pytest fixture that fails a test if a loss is slower than a saved baseline.

In conftest.py: ``pytest_plugins = ["rnnt_bench.pytest_plugin"]``.  In a test::

    def test_speed(not_slower):
        not_slower(my_loss, "baselines/my_loss", percent=10, vocab_size=500)

The first time it measures the baseline, leaves its log folder there, and skips the test.  Remove
the folder to measure the baseline anew.  The test is also skipped, with the reason, if there is no
verdict: too few rounds, other load, another machine.
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

#: A lock that is held while a loss is measured: tests that run at once, under pytest-xdist say,
#: would slow each other.
LOCK = Path(tempfile.gettempdir()) / "rnnt-bench-not-slower.lock"


@pytest.fixture
def not_slower(tmp_path: Path) -> Callable[..., None]:
    """Return a function that measures a loss, and fails the test if the loss is surely slower than
    the baseline."""

    def check(
        loss: api.Loss,
        baseline: str | Path,
        percent: float = 5.0,
        strict: bool = False,
        **flags: Any,
    ) -> None:
        """Measure a loss, and fail the test if a time is more than `percent` % above the baseline's
        even at the low end of its interval.

        If there is no baseline yet, keep this measurement as the baseline, and skip the test.

        Args:
            loss: a function or "mypackage.rnnt:loss".
            baseline: the log folder of the measurement to compare with.
            percent: how much slower the loss may be.
            strict: whether the test fails, instead of being skipped, if there is no verdict.
            flags: flags of ``rnnt-bench run``: preset="quick", rounds=3.
        """

        def no_verdict(reason: str) -> NoReturn:
            if strict:
                pytest.fail(reason)
            pytest.skip(reason)

        log = tmp_path / "log"
        with files.locked(LOCK, waiting=lambda: None):  # waits in silence
            rows = api.measure(loss, log_dir=log, **{"passes": "timing", **flags})
        for row in rows:
            assert row["status"] == "ok", f"{row['name']}: {row['reason']}"
        if not Path(baseline).exists():
            saved = api.command("compare", "--save-baseline", "kept", str(log))
            if saved.returncode != EXIT_OK:
                no_verdict(api.last_line(saved))
            shutil.copytree(log / "baselines" / "kept", baseline)
            pytest.skip(f"{baseline} holds the baseline from now on")
        # --strict gives an undecided comparison an exit code of its own; our `strict` then says
        # whether the test fails or is skipped.
        compared = api.command(
            "compare", str(baseline), str(log), "--fail-on-slower", f"{percent}%", "--strict"
        )
        if compared.returncode == EXIT_FAILED:
            pytest.fail(api.last_line(compared))
        if compared.returncode != EXIT_OK:
            no_verdict(api.last_line(compared))

    return check
