"""The throughput at the largest size that fits: the timing pass on batches of that size, the same utterances for all.

The utterances are those of the batches that the run's --batches and --num-batches choose at the largest size of any
implementation (see common.data.measured_batches); warm-up, clock and stopping rules are the timing pass's own.  The
limit is on, with the slack of making inputs, so that the machine is safe; that the size fits was the probes' to find
out.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional

from common.passes import memory_limit, probe, timing


def run(context, round_number: Optional[int] = 1) -> Iterator[Dict[str, Any]]:
    """``sample`` records.  `context`: common.running.worker.Context."""
    probe.warm_up(context, context.settings.scopes[0])
    limit = memory_limit.start(context)
    with limit.making():
        yield from timing.run(context, round_number)
