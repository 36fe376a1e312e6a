"""A pytest fixture that fails when a loss became slower than a saved baseline.

In conftest.py: ``pytest_plugins = ["rnnt_bench.pytest_plugin"]``.  In a test::

    def test_speed(not_slower):
        not_slower(my_loss, "baselines/my_loss", percent=10, vocab_size=500)

The first time it measures the baseline, leaves its log folder there and skips; remove the folder to measure it anew.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Callable, Union

import pytest

from rnnt_bench import api


@pytest.fixture
def not_slower(tmp_path: Path) -> Callable[..., None]:
    """Return a function that measures a loss and fails the test where it is surely slower than it was."""

    def check(loss: api.Loss, baseline: Union[str, Path], percent: float = 5.0, **flags: Any) -> None:
        """Measure `loss`, and fail where the whole interval of a time is above the baseline's by `percent` %.

        Args:
            loss, flags: as of `rnnt_bench.instruments`.
            baseline: the log folder of the measurement to compare with.
            percent: how much slower is no failure.
        """
        log = tmp_path / "log"
        for row in api.measure(loss, log_dir=log, **{"passes": "timing", **flags}):
            assert row["status"] == "ok", f"{row['name']}: {row['reason']}"
        if not Path(baseline).exists():
            shutil.copytree(log, baseline)
            pytest.skip(f"{baseline} holds the baseline from now on")
        try:
            api._run("compare", str(baseline), str(log), "--fail-on-slower", f"{percent}%")
        except ValueError as slower:
            pytest.fail(str(slower))

    return check
