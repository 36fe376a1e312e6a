"""Test whether a batch size fits: run one step of the heaviest batches of that size under an enforced memory limit.

The heaviest are the batch with the most padded cells and the one with the most useful cells, which packed losses use. A
step that runs out of memory, whatever the error is called, does not fit; the status record of the job says so.  Each
size has a process of its own, started like that of the memory pass.  Measures no times: the throughput pass does.
"""

from __future__ import annotations

import math
from typing import Iterator, Union

from common.data import batching
from common.measure import memory
from common.records.schema import Fit, Probe


def limit_of(context, scope: str) -> memory.Limit:
    """Return the memory limit, after a step of one utterance, which loads and compiles all that a first step does.

    On CUDA a step of one utterance of each batch runs first: a kernel takes memory when it is first launched, and each
    size may have kernels of its own.
    """
    tried = batching.heaviest(context.all_batches) if context.device.type == "cuda" else context.batches[:1]
    for batch in tried:
        context.step(scope, batch, utterances=1).run()
        context.model.zero_grad(set_to_none=True)
    return memory.limit(context.device, context.settings.memory_limit, context.limit_bytes)


def run(context) -> Iterator[Union[Probe, Fit]]:
    """Yield a ``probe`` record before each step, which says what is tried, and a ``fit`` record after it.

    `context` is a common.losses.subject.Context.
    """
    (scope,) = context.settings.scopes
    limit = limit_of(context, scope)
    for batch in batching.heaviest(context.all_batches):
        sizes = context.all_batches.describe(batch)
        yield Probe(
            scope=scope,
            **{name: sizes[name] for name in sizes if name in Probe.__struct_fields__},
            limit_bytes=limit.bytes,
            limit_kind=limit.kind,
            warnings=[f"{context.adapter.name}: {warning}" for warning in limit.warnings],
        )
        with limit.making():
            step = context.step(scope, batch)
        with limit.enforced():
            loss = float(step.run())
        del step
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss of a batch that fits is {loss}")
        yield Fit(scope=scope, batch=batch, loss=loss, peak_bytes=limit.peak_bytes)
        context.model.zero_grad(set_to_none=True)
