"""One case of one adapter in this process: whatever it does, short of ending the process, becomes an Outcome."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Callable

import torch

from common.conformance import checks, reproductions
from common.conformance.cases import Case
from common.conformance.outcomes import DIFFERS, ERROR, NOT_APPLICABLE, REFUSES, Outcome
from common.conformance.questions import Examination, NotAsked, Question, Refused, message
from common.errors import NotRunnable
from common.losses.adapter import Adapter


def judge(
    case: Case, adapter: Adapter, device: torch.device, asked: Callable[[str], None] = lambda reproduction: None
) -> Outcome:
    """An error of the loss is "refuses"; one of the suite or of the adapter's own preparations "error".

    asked: told the reproduction of each question before the loss hears it, for a loss that ends the process.
    """
    questions = []

    def told(question: Question) -> None:
        questions.append(question)
        asked(reproductions.of(case, question, crashes=True))

    try:
        outcome = getattr(checks, case.check)(Examination(adapter, device, told), **case.values)
    except Refused as refusal:
        return Outcome(REFUSES, str(refusal))
    except (NotAsked, NotRunnable) as reason:
        return Outcome(NOT_APPLICABLE, str(reason))
    except Exception as error:
        traceback.print_exc()
        return Outcome(ERROR, message(error))
    if outcome.result == DIFFERS and questions:
        return replace(outcome, reproduction=reproductions.of(case, questions[0]))
    return outcome
