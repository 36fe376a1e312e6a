"""Measure the throughput at the largest size that fits: the timing pass on batches of that size.

The utterances are those of the batches that --batches and --num-batches choose at the largest size of any
implementation (see common.data.measured_batches); warm-up, clock and stopping rules are those of the timing pass.  The
limit protects the machine, with the slack for making inputs: the probes have already shown that the size fits.
"""

from __future__ import annotations

from typing import Iterator, Union

from common.losses.passes import probe, timing


def run(context) -> Iterator[Union[timing.Sample, timing.Stop]]:
    """Yield ``sample`` records as the timing pass does; `context` is a common.losses.subject.Context."""
    with probe.limit_of(context, context.settings.scopes[0]).making():
        yield from timing.run(context)
