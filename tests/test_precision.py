"""The joiner under autocast and under torch.compile: what a loss is given, and that the result is still right."""

from __future__ import annotations

import pytest
import torch
from commands import rows_of, run
from test_contract import adapter_of
from test_measured_size import context_of

from common.core.implementations import find
from common.losses import oracle, step
from common.losses.passes import at_size


@pytest.mark.parametrize(
    "name, given",
    [
        ("reference", torch.bfloat16),
        ("torchaudio", torch.float32),  # takes float16, not bfloat16
        ("optimized_transducer", torch.float32),
        ("fast_rnnt-pruned", torch.float32),
        ("fast_rnnt-simple", torch.float32),
        ("fused", None),
    ],
)
def test_autocast_rounds_the_products_and_gives_each_loss_a_dtype_that_it_takes(name, given):
    errors = {}
    for amp in (None, "bfloat16"):
        adapter = adapter_of(find(name), "cpu", vocab_size=40, amp=amp)
        context = context_of(adapter)
        found = at_size.check(context, oracle.TOLERANCE[adapter.settings.precision])
        assert found["ok"], found
        errors[amp] = found["grad_error"]
        if given and amp:
            one = step.prepare(adapter, context.model, context.make_batch(0), "loss")
            assert one.given.dtype == given
        one = step.prepare(adapter, context.model, context.make_batch(0), "step")
        one.run()
        gradients = [gradient for gradient in one.gradients().values() if gradient is not None]
        assert gradients and all(gradient.dtype == torch.float32 for gradient in gradients)
    assert errors["bfloat16"] > 10 * errors[None]


def test_a_run_with_autocast_and_torch_compile(tmp_path, tiny_shapes):
    """As the correctness pass judges it, at the measured size; a loss that is compiled too: test_contract.py."""
    flags = ["--in-place", "--preset", "quick", "--shape-file", tiny_shapes, "--log-dir", tmp_path]
    only = ["--only", "reference", "--passes", "correctness", "--scope", "step", "--limits", "false"]
    done = run("benchmark_all.py", *flags, *only, "--amp", "bfloat16", "--compile", "true")
    (row,) = rows_of(tmp_path).values()
    assert row["status"] == ("ok" if hasattr(torch, "compile") else "unsupported"), done.stderr
    assert "autocast bfloat16" in done.stdout and "joiner compiled" in done.stdout
    assert row["configuration"]["amp"] == "bfloat16" and row["configuration"]["compile"] is True
