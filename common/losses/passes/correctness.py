"""Judge loss and gradient on small batches (small_batches.py) against the float64 oracle: the correctness pass.

Both scopes: the gradient of what the loss is given, and the step's gradients of encoder_out, decoder_out and every
weight.  A pruned loss is judged with its range widened to all of U, where it must be exact; the record also has its gap
to the exact loss at the run's own range.  Then a loss that passes is judged on a measured batch at its own size
(at_size.py), on one as long as the longest of the shape file, and once more on a small one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Iterator, List, Optional

import numpy as np
import torch

from common.core import statistics
from common.core.errors import WrongResult
from common.core.text import finite
from common.data import batching
from common.losses import layouts
from common.losses.oracle import TOLERANCE
from common.losses.passes import at_size, small_batches
from common.records.schema import Correctness

#: Utterances of the measured batch with --find-largest, which has yet to find the size that fits.
SEARCH_UTTERANCES = 2
#: Utterances whose gap to the exact loss is measured, half a second each.
GAP_UTTERANCES = 20
#: Nats; a difference between smaller losses is rounding.
SMALLEST_LOSS = 1e-6
#: Targets of a batch as long as the longest of the file, where no measured one is: few, so that it takes little.
LONG_U = 4
#: Frames of it for each unit in the last place that its sums may lose: right float32 kernels lose one in 60.
FRAMES_A_PLACE = 20


def approximation_gap(context) -> Optional[float]:
    """Return the median (loss - exact loss) / exact loss of a pruned loss over some of the run's utterances.

    Each alone and in float64: it is the gap of the method and not of the dtype.  None if the exact losses are almost 0.
    """
    adapter, double = context.adapter, replace(context, dtype=torch.float64)
    layout = layouts.of(adapter)
    model, gaps = layout.model(context.device, torch.float64), []
    every = [(batch, n) for batch in context.batches for n, (_, U) in enumerate(context.all_batches[batch]) if U > 0]
    for batch, n in every[:: math.ceil(len(every) / GAP_UTTERANCES) or 1]:
        alone = small_batches.utterance(double.make_batch(batch), n)
        prepared = adapter.prepare(alone)
        with torch.no_grad():
            loss = float(layout.loss(layout.given(model, alone, prepared), alone, prepared))
            exact = float(layout.right(model.logits(alone), alone).sum())
        if exact > SMALLEST_LOSS:
            gaps.append(finite((loss - exact) / exact))
    return statistics.median(sorted(gaps)) if gaps else None


def run(context) -> Iterator[Correctness]:
    """Yield one ``correctness`` record of a subject.Context; raise WrongResult, in words, after one that is not ok."""
    adapter, device, dtype, settings = context.adapter, context.device, context.dtype, context.settings
    layout, tolerance = layouts.of(adapter), TOLERANCE[settings.dtype]
    small = small_batches.check(adapter, device, dtype)
    gap = approximation_gap(context) if layout.approximate else None
    wrong, at_its_size = small.wrong, None
    differing: List[str] = []
    reached: List[str] = []
    if not wrong and not adapter.simulated:  # a simulator would take hours
        few = SEARCH_UTTERANCES if settings.find_largest else None
        at_its_size, wrong = at_size.check(context, tolerance, few)
        T = int(context.all_batches.longest().max())
        if not wrong and T > max(at_its_size.T_max, 2 * LONG_U) and not few and not context.loops_in_python:
            long = batching.fixed_size(np.array([(T, LONG_U), (T - 1, LONG_U - 1), (T // 2, LONG_U - 2)]), 3)
            context_of_long, places = replace(context, all_batches=long, batches=[0]), 4 + T // FRAMES_A_PLACE
            wrong = at_size.check(context_of_long, tolerance, lost_places=places)[1]
        if not wrong:
            wrong = small_batches.check(adapter, device, dtype, [small_batches.again(adapter)]).wrong
            differing, reached = small_batches.repeated(adapter, device, dtype)
            differing = sorted({*differing, *at_its_size.differing})
    elif wrong and not max(small.loss_error, small.grad_error) <= tolerance:
        sizes = [at_size.size(finite(error)) for error in (small.loss_error, small.grad_error)]
        wrong = f"loss {sizes[0]}, gradient {sizes[1]}; {tolerance:.0e} is allowed; {wrong}"
    yield Correctness(
        loss_error=finite(small.loss_error),
        grad_error=finite(small.grad_error),
        slope_error=finite(small.slope_error),
        tolerance=tolerance,
        ok=not wrong,
        approximation_gap=gap,
        approximation_gaps={settings.logits: gap} if layout.approximate else None,
        at_size=at_its_size,
        differing=differing,
        reached_by_padding=reached,
        note="approximate; judged with its range widened to all of U" if layout.approximate else "",
    )
    if wrong:
        raise WrongResult(wrong)
