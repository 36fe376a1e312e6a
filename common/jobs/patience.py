"""Waiting for a quiet machine."""

from __future__ import annotations

import time

from common.core.settings import Settings
from common.jobs.executor import Executor

#: How long to look before a machine is called quiet.
LOOK_SECONDS = 2.0


class Patience:
    """Waits for a quiet machine, for `seconds` in all."""

    def __init__(self, seconds: float):
        self.left, self.is_over = seconds, False

    def until_quiet(self, executor: Executor, settings: Settings) -> bool:
        """Return whether the machine is quiet, as soon as it is; False when the time is over."""
        while not self.is_over:
            begin = time.monotonic()
            if not executor.disturbance(settings, LOOK_SECONDS):
                return True
            self.left -= time.monotonic() - begin
            self.is_over = self.left <= 0
        return False
