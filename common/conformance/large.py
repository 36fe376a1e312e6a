"""Judge a loss of more than 2^31 elements: 8 GiB of logits, too large for the float64 oracle as a whole.

A formula gives the logits of each frame; from it the expected loss, and the gradients of a few frames, are computed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from common.conformance.answers import listed, size
from common.conformance.outcomes import DIFFERS, PASS, Outcome
from common.conformance.questions import Examination, NotAsked, Question, message
from common.losses import oracle
from common.losses.layouts import table
from common.losses.oracle import relative_error
from common.measure.memory import AddressSpace
from common.system import memory

#: Utterances, frames and targets of each, and V.
N, T, U, LARGE_V = 2, 64, 63, 2**18 + 2**12
#: Memory that every loss needs, in units of the logits: the logits and their gradient.
LARGE_ROOM = 2
#: Bytes of memory that are left for everything else on the machine, on a CPU.
LEFT_BYTES = 2**30


def more_than_2_31_elements(exam: Examination, allowed: bool) -> Outcome:
    """Judge logits of 2^31 + 2^25 elements: the last frames of the last utterance are beyond 2^31.

    On a CPU a limit keeps the process within the available memory, so that too little of it is an error and the kernel
    kills nothing.  `allowed` is False without --large.
    """
    if not allowed:
        raise NotAsked("not asked without --large")
    if exam.adapter.simulated:
        raise NotAsked("not in a simulator, which would take days")
    if table.of(exam.adapter).never_large:
        raise NotAsked(table.of(exam.adapter).never_large)
    needed, on_cuda = N * T * (U + 1) * LARGE_V * 4 * LARGE_ROOM, exam.device.type == "cuda"
    available = torch.cuda.mem_get_info(exam.device)[0] if on_cuda else memory.available_memory()
    if available is None:
        raise NotAsked("how much memory is available is not known on this system")
    free = available if on_cuda else max(available - LEFT_BYTES, 0)
    if free < needed:
        raise NotAsked(f"needs {needed / 2**30:.0f} GiB of memory at least; {free / 2**30:.0f} are free")
    try:
        with nullcontext() if on_cuda else AddressSpace(free).enforced():
            question = _question(exam)
            loss = question.loss()
            answer = loss.detach().cpu().double()
            return _compared(question, answer, question.backward(loss).view(N, T, U + 1, LARGE_V))
    except NotAsked as reason:
        raise NotAsked(f"with {free / 2**30:.0f} GiB: {reason}") from reason
    except Exception as error:
        if memory.is_out_of_memory(error):
            raise NotAsked(f"with {free / 2**30:.0f} GiB: {message(error)}") from error
        raise


def _pattern() -> torch.Tensor:
    """Return the pattern (U+1, V) float32 of which every frame is a multiple."""
    return (3 * torch.sin(0.7 * torch.arange((U + 1) * LARGE_V, dtype=torch.float64))).float().view(U + 1, LARGE_V)


def _frame(pattern: torch.Tensor, n: int, t: int) -> torch.Tensor:
    """Return the logits (U+1, V) of frame t of utterance n."""
    return pattern * (1 + (t + 5 * n) / 64)


def _question(exam: Examination) -> Question:
    """Return the question about these logits, without the right answer."""
    small = exam.ask([(T, U)] * N, V=2)
    logits = torch.empty(N, T, U + 1, LARGE_V, device=exam.device)
    pattern = _pattern().to(exam.device)
    for n in range(N):
        for t in range(T):
            logits[n, t] = _frame(pattern, n, t)
    targets = (1 + torch.arange(N * U) * 4099 % (LARGE_V - 1)).view(-1, U)
    batch = replace(small.batch, targets=targets.to(small.batch.targets))
    prepared, layout = exam.adapter.prepare(batch), table.of(exam.adapter.widened(U))
    leaf = layout.take(logits, batch, prepared).requires_grad_()
    return Question(layout, batch, prepared, leaf, torch.empty(0), None)


def _compared(question: Question, answer: torch.Tensor, gradient: torch.Tensor) -> Outcome:
    """Compare the summed loss, and the gradients of the first, middle and last frame of each utterance."""
    pattern, topology = _pattern(), question.adapter.lattice
    total, worst, largest = 0.0, [], []
    for n, targets in enumerate(question.batch.targets.cpu().long()):
        following = torch.nn.functional.pad(targets[:U], (0, 1))
        parts = [topology.parts(_frame(pattern, n, t).double(), following, 0) for t in range(T)]
        likelihood, derivatives = oracle.of_parts(torch.stack(parts), topology)
        total -= likelihood
        for t in (0, T // 2, T - 1):
            logits = _frame(pattern, n, t).double()
            right = oracle.cell_gradient(logits, following, derivatives[t], 0, topology)
            worst.append((gradient[n, t].cpu().double() - right).abs().max())
            largest.append(right.abs().max())
    loss_error = relative_error(answer.sum(), torch.tensor(total))
    grad_error = float(torch.stack(worst).max() / torch.stack(largest).max())  # nan where one is
    wrong = [] if loss_error <= 1e-4 else [f"loss {listed(answer)} instead of {total:.6g}"]
    if not grad_error <= 1e-4 + 4 * torch.finfo(torch.float32).eps * total:
        wrong.append(f"gradient off by {size(grad_error)}")
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)
