"""Judge one case of one adapter in this process: everything that does not end the process becomes an Outcome."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Callable, List

import torch

from common.conformance import checks, questions, reproductions
from common.conformance.cases import Case
from common.conformance.questions import Examination, NotAsked, Question, Refused, message
from common.conformance.records import CRASHES, DIFFERS, ERROR, NOT_APPLICABLE, REFUSES, Outcome
from common.core.errors import NotRunnable
from common.losses.adapter import Adapter

LOST = "the CUDA context is lost"


def judge(
    case: Case, adapter: Adapter, device: torch.device, asked: Callable[[str], None] = lambda reproduction: None
) -> Outcome:
    """Return the outcome of a case.

    An error of the loss is "refuses".  If it lost the CUDA context, so that this process can judge no other case, it is
    "crashes".  An error of the suite, or of the adapter's `prepare`, is "error".

    `asked` is called with the reproduction of each question before the loss is called, which may end the process.
    """
    heard: List[Question] = []
    fatal = ""

    def noted(question: Question) -> None:
        nonlocal fatal
        heard.append(question)
        fatal = reproductions.of(case, question, crashes=True)
        asked(fatal)

    try:
        check = getattr(checks, case.check or case.name.replace("-", "_"))
        outcome = check(Examination(adapter, device, noted), **case.values)
    except Refused as refusal:
        return Outcome(REFUSES, str(refusal))
    except (NotAsked, NotRunnable) as reason:
        return Outcome(NOT_APPLICABLE, str(reason))
    except questions.ContextLost as error:
        return Outcome(CRASHES, f"{LOST}: {error}", reproduction=fatal)
    except Exception as error:
        if questions.context_lost(device):
            return Outcome(CRASHES, f"{LOST}: {message(error)}", reproduction=fatal)
        traceback.print_exc()
        return Outcome(ERROR, message(error))
    if outcome.result == DIFFERS and heard:
        return replace(outcome, reproduction=reproductions.of(case, heard[0]))
    return outcome
