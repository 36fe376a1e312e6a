"""Judge a loss of more than 2^31 elements: 8 GiB of logits, too large for the float64 oracle as a whole.

A formula gives the logits of each frame; from it the expected loss, and the gradients of a few frames, are computed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from common.conformance.answers import listed, size
from common.conformance.questions import Examination, NotAsked, Question, message
from common.conformance.records import DIFFERS, PASS, Outcome
from common.losses import oracle
from common.losses.layouts import table
from common.losses.oracle import relative_error
from common.measure.memory import AddressSpace
from common.system import memory

LARGE_SHAPES, LARGE_V = [(64, 63), (64, 63)], 2**18 + 2**12
#: Memory that every loss needs, in units of the logits: the logits and their gradient.
LARGE_ROOM = 2
#: Bytes of memory that are left for everything else on the machine, on a CPU.
LEFT_BYTES = 2**30


def more_than_2_31_elements(exam: Examination, allowed: bool) -> Outcome:
    """Judge logits of 2^31 + 2^25 elements: the last frames of the last utterance are beyond 2^31.

    On a CPU a limit keeps the process within the available memory, so that too little of it is an error and the kernel
    kills nothing.  `allowed` is False without --large.
    """
    N, (T, U) = len(LARGE_SHAPES), LARGE_SHAPES[0]
    count = N * T * (U + 1) * LARGE_V
    if not allowed:
        raise NotAsked("not asked without --large")
    if exam.adapter.simulated:
        raise NotAsked("not in a simulator, which would take days")
    if table.of(exam.adapter).never_large:
        raise NotAsked(table.of(exam.adapter).never_large)
    needed = count * 4 * LARGE_ROOM
    free = torch.cuda.mem_get_info(exam.device)[0] if exam.device.type == "cuda" else _room()
    if free < needed:
        raise NotAsked(f"needs {needed / 2**30:.0f} GiB of memory at least; {free / 2**30:.0f} are free")
    try:
        with nullcontext() if exam.device.type == "cuda" else AddressSpace(free).enforced():
            question = _large_question(exam)
            loss = question.forward()
            answer = loss.detach().cpu().double()
            gradient = question.backward(loss).view(N, T, U + 1, LARGE_V)
            return _compare_large(question, answer, gradient)
    except NotAsked as reason:
        raise NotAsked(f"with {free / 2**30:.0f} GiB: {reason}") from reason
    except Exception as error:
        if memory.is_out_of_memory(error):
            raise NotAsked(f"with {free / 2**30:.0f} GiB: {message(error)}") from error
        raise


def _room() -> int:
    """Return the bytes that this process may use on a CPU; raise NotAsked if they are not known."""
    available = memory.available_memory()
    if available is None:
        raise NotAsked("how much memory is available is not known on this system")
    return max(available - LEFT_BYTES, 0)


def _pattern() -> torch.Tensor:
    """Return the pattern (U+1, V) float32 of which every frame is a multiple."""
    (_, U), count = LARGE_SHAPES[0], (LARGE_SHAPES[0][1] + 1) * LARGE_V
    return (3 * torch.sin(0.7 * torch.arange(count, dtype=torch.float64))).float().view(U + 1, LARGE_V)


def _frame(pattern: torch.Tensor, n: int, t: int) -> torch.Tensor:
    """Return the logits (U+1, V) of frame t of utterance n."""
    return pattern * (1 + (t + 5 * n) / 64)


def _large_question(exam: Examination) -> Question:
    """Return the question about these logits, without the right answer."""
    small = exam.ask(LARGE_SHAPES, V=2)
    T, U = LARGE_SHAPES[0]
    logits = torch.empty(len(LARGE_SHAPES), T, U + 1, LARGE_V, device=exam.device)
    pattern = _pattern().to(exam.device)
    for n in range(len(LARGE_SHAPES)):
        for t in range(T):
            logits[n, t] = _frame(pattern, n, t)
    targets = (1 + torch.arange(len(LARGE_SHAPES) * U) * 4099 % (LARGE_V - 1)).view(-1, U)
    batch = replace(small.batch, targets=targets.to(small.batch.targets))
    prepared = exam.adapter.prepare(batch)
    layout = table.of(exam.adapter.widened(U))
    leaf = layout.take(logits, batch, prepared).requires_grad_()
    return Question(layout, batch, prepared, leaf, torch.empty(0), None, [])


def _compare_large(question: Question, answer: torch.Tensor, gradient: torch.Tensor) -> Outcome:
    """Compare the summed loss, and the gradients of the first, middle and last frame of each utterance."""
    (T, U), pattern = LARGE_SHAPES[0], _pattern().double()
    topology = question.adapter.lattice
    total, worst, largest = 0.0, [], []
    for n, targets in enumerate(question.batch.targets.cpu().long()):
        parts, rows = [], {}
        following = torch.nn.functional.pad(targets[:U], (0, 1))
        for t in range(T):
            logits = _frame(_pattern() if t == 0 else pattern.float(), n, t).double()
            parts.append(topology.parts(logits, following, 0))
            if t in (0, T // 2, T - 1):
                rows[t] = logits
        likelihood, derivatives = oracle.of_parts(torch.stack(parts), topology)
        total -= likelihood
        for t, logits in rows.items():
            right = oracle.cell_gradient(logits, following, derivatives[t], 0, topology)
            worst.append((gradient[n, t].cpu().double() - right).abs().max())
            largest.append(right.abs().max())
    loss_error = relative_error(answer.sum(), torch.tensor(total))
    grad_error = float(torch.stack(worst).max() / torch.stack(largest).max())  # nan where one is
    wrong = []
    if not loss_error <= 1e-4:
        wrong.append(f"loss {listed(answer)} instead of {total:.6g}")
    if not grad_error <= 1e-4 + 4 * torch.finfo(torch.float32).eps * total:
        wrong.append(f"gradient off by {size(grad_error)}")
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)
