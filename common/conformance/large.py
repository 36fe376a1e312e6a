"""The case of more than 2^31 elements: 8 GiB of logits, too many for the float64 reference as a whole, so that the loss
and the gradients of a few frames are computed from a formula, frame by frame.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace

import torch

from common.conformance.outcomes import DIFFERS, PASS, Outcome
from common.conformance.questions import Examination, NotAsked, Question, listed, message, size
from common.losses import reference
from common.passes.correctness import relative_error
from common.passes.memory_limit import AddressSpace
from common.running import machine
from common.running.worker import is_out_of_memory

LARGE_SHAPES, LARGE_V = [(64, 63), (64, 63)], 2**18 + 2**12
#: The logits and their gradient: no loss does with less.
LARGE_ROOM = 2
#: On a CPU, what is left to everything else on the machine.
LEFT_BYTES = 2**30


def more_than_2_31_elements(exam: Examination, allowed: bool) -> Outcome:
    """Logits of 2^31 + 2^25 elements: the last frames of the last utterance lie beyond 2^31.  On a CPU the process gets
    the memory that is available and no more, so that want of it is an error here and not the kernel's choice of whom to
    kill."""
    N, (T, U) = len(LARGE_SHAPES), LARGE_SHAPES[0]
    count = N * T * (U + 1) * LARGE_V
    if not allowed:
        raise NotAsked("not asked without --large")
    if exam.adapter.simulated:
        raise NotAsked("not in a simulator, which would take days")
    if exam.adapter.layout == "additive":
        raise NotAsked("it takes am and lm, which are never that large")
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
        if is_out_of_memory(error):
            raise NotAsked(f"with {free / 2**30:.0f} GiB: {message(error)}") from error
        raise


def _room() -> int:
    """Bytes that this process may take on a CPU."""
    available = machine.available_memory()
    if available is None:
        raise NotAsked("this system does not tell how much memory is available")
    return max(available - LEFT_BYTES, 0)


def _pattern() -> torch.Tensor:
    """(U+1, V) float32, of which every frame has a multiple."""
    (_, U), count = LARGE_SHAPES[0], (LARGE_SHAPES[0][1] + 1) * LARGE_V
    return (3 * torch.sin(0.7 * torch.arange(count, dtype=torch.float64))).float().view(U + 1, LARGE_V)


def _frame(pattern: torch.Tensor, n: int, t: int) -> torch.Tensor:
    return pattern * (1 + (t + 5 * n) / 64)


def _large_question(exam: Examination) -> Question:
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
    wide = copy.copy(exam.adapter.widened(U))
    if exam.adapter.layout == "packed":
        leaf = logits.view(-1, LARGE_V)  # all utterances are as long: packed is padded
    else:
        leaf = wide.take(logits, batch, prepared)
    return Question(wide, batch, prepared, leaf.requires_grad_(), torch.empty(0), None, [])


def _compare_large(question: Question, answer: torch.Tensor, gradient: torch.Tensor) -> Outcome:
    """The whole loss, and the gradient of first, middle and last frame of each utterance."""
    (T, U), pattern = LARGE_SHAPES[0], _pattern().double()
    total, worst, largest = 0.0, 0.0, 0.0
    for n, targets in enumerate(question.batch.targets.cpu().long()):
        blank, label, rows = [], [], {}
        for t in range(T):
            logits = _frame(_pattern() if t == 0 else pattern.float(), n, t).double()
            log_probs = logits - logits.logsumexp(-1, keepdim=True)
            blank.append(log_probs[:, 0].tolist())
            label.append(log_probs[:U].gather(1, targets[:U, None]).squeeze(1).tolist())
            if t in (0, T // 2, T - 1):
                rows[t] = log_probs
        likelihood, d_blank, d_label = reference.lattice(blank, label, T, U, question.adapter.topology)
        total -= likelihood
        for t, log_probs in rows.items():
            arcs = (torch.tensor(derivatives, dtype=torch.float64) for derivatives in (d_blank[t], [*d_label[t], 0.0]))
            right = reference.cell_gradient(log_probs, *arcs, torch.nn.functional.pad(targets[:U], (0, 1)))
            worst = max(worst, (gradient[n, t].cpu().double() - right).abs().max().item(), key=_badness)
            largest = max(largest, right.abs().max().item())
    loss_error, grad_error = relative_error(answer.sum(), torch.tensor(total)), worst / largest
    wrong = []
    if not loss_error <= 1e-4:
        wrong.append(f"loss {listed(answer)} instead of {total:.6g}")
    if not grad_error <= 1e-4 + 4 * torch.finfo(torch.float32).eps * total:
        wrong.append(f"gradient off by {size(grad_error)}")
    return Outcome(DIFFERS if wrong else PASS, "; ".join(wrong), loss_error, grad_error)


def _badness(value: float) -> float:
    return math.inf if value != value else value
