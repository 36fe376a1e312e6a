"""Does a batch size fit?  One forward and backward of the heaviest batches of that size, under an enforced limit.

The heaviest are the batch with the most padded cells and the one with the most useful cells, which packed losses work
on.  What ends in a lack of memory, by whatever name, does not fit; the status record of the job says so.  Each size has
a process of its own, started as the memory pass is.  Times nothing: that is the throughput pass.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, Optional

from common.data import batching
from common.losses import work
from common.passes import memory_limit


def warm_up(context, scope: str) -> None:
    """A step of one utterance: loads, starts and compiles what a first step does."""
    first = context.make_batch(context.batches[0], 0, utterances=1)
    work.prepare(context.adapter, context.model, first, scope).run()
    context.model.zero_grad(set_to_none=True)


def step(context, limit: memory_limit.Limit, scope: str, batch: int) -> float:
    """The loss of one step of `batch` that keeps within the limit; whatever comes of a lack of memory otherwise."""
    with limit.making():
        prepared = work.prepare(context.adapter, context.model, context.make_batch(batch, 0), scope)
    with limit.enforced():
        return float(prepared.run())


def run(context, round_number: Optional[int] = None) -> Iterator[Dict[str, Any]]:
    """A ``probe`` record of what is tried before each step, and a ``fit`` record after it.  `context`:
    common.running.worker.Context."""
    (scope,) = context.settings.scopes
    warm_up(context, scope)
    limit = memory_limit.start(context)
    for batch in batching.heaviest(context.all_batches):
        yield {
            "record": "probe",
            "scope": scope,
            **context.all_batches.describe(batch),
            "limit_bytes": limit.bytes,
            "limit_kind": limit.kind,
            "warnings": [f"{context.adapter.name}: {warning}" for warning in limit.warnings],
        }
        loss = step(context, limit, scope, batch)
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of a batch that fits is {loss}")
        yield {"record": "fit", "scope": scope, "batch": batch, "loss": loss, "peak_bytes": limit.peak_bytes}
        context.model.zero_grad(set_to_none=True)
