"""The code that README and the report give to copy: it runs as it stands, and computes the loss."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from common.core import snippets
from common.core.implementations import BY_NAME
from common.setup import environments

#: Made inputs in the names of the snippets, and torchaudio's loss or torch's own of the same logits.
BEGIN = """
import torch
torch.manual_seed(0)
N, T, U, D, V = 3, 9, 4, 8, 11
encoder_out, decoder_out = torch.randn(N, T, D), torch.randn(N, U + 1, D)
output_linear, am_linear, lm_linear = (torch.nn.Linear(D, V) for _ in range(3))
targets = torch.randint(1, V, (N, U), dtype=torch.int32)
T_lengths, U_lengths = torch.tensor([9, 7, 8], dtype=torch.int32), torch.tensor([4, 3, 2], dtype=torch.int32)
"""
RIGHT = """
def alone(logits, targets):
    scores = logits.log_softmax(-1).double()
    T, U = scores.size(0), scores.size(1) - 1
    alpha = {}
    for t in range(T):
        for u in range(U + 1):
            ways = [torch.zeros((), dtype=torch.float64)] if t == u == 0 else []
            ways += [alpha[t - 1, u] + scores[t - 1, u, 0]] if t else []
            ways += [alpha[t, u - 1] + scores[t, u - 1, int(targets[u - 1])]] if u else []
            alpha[t, u] = torch.stack(ways).logsumexp(0)
    return -(alpha[T - 1, U] + scores[T - 1, U, 0])
"""
END = """
right = [alone(full[n, :t, : u + 1], targets[n]) for n, (t, u) in enumerate(zip(T_lengths, U_lengths))]
print(float(loss.detach()), float(sum(right)) / len(right))
"""


def printed(text: str, python: Path) -> str:
    """Return what a program prints: in this process where it is for this Python, which has torch already."""
    if python.parent != Path(sys.executable).parent:
        return subprocess.run([python, "-W", "ignore", "-c", text], check=True, capture_output=True, text=True).stdout
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        exec(text, {"__name__": "__main__"})
    return output.getvalue()


@pytest.mark.parametrize("name", snippets.SNIPPETS)
def test_a_snippet_runs_and_computes_the_loss(name):
    code = snippets.snippet(name)
    assert 3 <= len(code.splitlines()) <= 12 and max(map(len, code.splitlines())) < 80
    implementation = BY_NAME[name]
    python = environments.interpreter(implementation.environment)
    if python is None:
        pytest.skip(f"there is no environment {implementation.environment}")
    module = "fused_transducer" if name == "fused" else implementation.package
    load = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    if implementation.built:
        load += f"from common.setup import extensions; sys.modules[{module!r}] = extensions.load({module!r}, 'cpu')\n"
    text = "".join([BEGIN, load, snippets.JOINER, "full = logits.detach().clone()\n", code, RIGHT, END])
    loss, right = map(float, printed(text, python).split())
    if name.endswith("pruned"):
        assert 0 < loss < 100 * right
    else:
        assert loss == pytest.approx(right, rel=1e-4)
