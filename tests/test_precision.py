"""The joiner under autocast and under torch.compile: what a loss is given, and that the result is still right."""

from __future__ import annotations

import warnings

import pytest
import torch
from commands import rows_of, run
from test_contract import adapter_of, context_of

from common.core.implementations import find
from common.losses import oracle, step
from common.losses.passes import at_size


def rounds_to(dtype):
    """Does autocast on this CPU, with this torch?"""
    ones = torch.ones(2, 2)
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=dtype):
        warnings.simplefilter("ignore")  # "disabling autocast"
        return (ones @ ones).dtype == dtype


@pytest.mark.parametrize(
    "name, amp, given",
    [
        ("reference", "bfloat16", torch.bfloat16),
        ("reference", "float16", torch.float16),
        ("torchaudio", "bfloat16", torch.float32),
        ("torchaudio", "float16", torch.float16),
        ("optimized_transducer", "bfloat16", torch.float32),
        ("optimized_transducer", "float16", torch.float32),
        ("fast_rnnt-pruned", "bfloat16", torch.float32),
        ("fast_rnnt-pruned", "float16", torch.float32),
        ("fused", "bfloat16", None),
        ("fused", "float16", None),
    ],
)
def test_autocast_rounds_the_products_and_gives_each_loss_a_dtype_that_it_takes(name, amp, given):
    if not rounds_to(getattr(torch, amp)):
        pytest.skip(f"autocast on the CPU does not take {amp} here")
    errors = {}
    for autocast in (None, amp):
        adapter = adapter_of(find(name), "cpu", vocab_size=40, amp=autocast)
        context = context_of(adapter)
        result, _ = at_size.check(context, oracle.TOLERANCE[adapter.settings.precision])
        assert result.ok, result
        errors[autocast] = result.grad_error
        if given and autocast:
            inputs = step.prepare(adapter, context.model, context.make_batch(0), "loss")
            assert inputs.given.dtype == given
        inputs = step.prepare(adapter, context.model, context.make_batch(0), "step")
        inputs.run()
        gradients = [gradient for gradient in inputs.gradients().values() if gradient is not None]
        assert gradients and all(gradient.dtype == torch.float32 for gradient in gradients)
    assert errors[amp] > 10 * errors[None]


@pytest.mark.thorough
def test_a_run_with_autocast_and_torch_compile(tmp_path, tiny_shapes):
    """The correctness pass judges it at the measured size; a loss that is compiled too: test_contract.py."""
    flags = ["--in-place", "--preset", "quick", "--shape-file", tiny_shapes, "--log-dir", tmp_path]
    only = ["--only", "reference", "--passes", "correctness", "--scope", "step", "--limits", "false"]
    done = run("benchmark_all.py", *flags, *only, "--amp", "bfloat16", "--compile", "true")
    (row,) = rows_of(tmp_path).values()
    assert row["status"] == ("ok" if hasattr(torch, "compile") else "unsupported"), done.stderr
    assert "autocast bfloat16" in done.stdout and "joiner compiled" in done.stdout
    assert row["configuration"]["amp"] == "bfloat16" and row["configuration"]["compile"] is True
