"""Models of fairseq as stages of a pipeline, where fairseq is installed, called as its own benchmark calls them."""

from __future__ import annotations

import importlib
import os
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Tuple

import torch
from torch import nn

from common.core.errors import NotRunnable, UserError
from common.tools import loading

#: torch.load reads it at each call that does not say weights_only, as fairseq's do not.
TRUSTING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextmanager
def unpickling() -> Iterator[None]:
    """Let torch.load unpickle any object inside the block, as torch did before 2.6."""
    before = os.environ.get(TRUSTING)
    os.environ[TRUSTING] = "1"
    try:
        yield
    finally:
        os.environ.pop(TRUSTING)
        if before is not None:
            os.environ[TRUSTING] = before


class Generation(nn.Module):
    """A checkpoint with the generator of its task: (src_tokens, src_lengths) -> what the generator gives.

    Args:
        path: of the checkpoint.
        data: the task's folder, with its dictionaries.
        trust_pickle: has to be true, since a checkpoint of fairseq is a pickle and can run code.
        overrides: of the checkpoint's arguments.
    """

    def __init__(self, path: str, data: Optional[str] = None, trust_pickle: bool = False, **overrides: Any):
        super().__init__()
        try:
            utils = importlib.import_module("fairseq.checkpoint_utils")
        except ImportError as error:
            words = loading.line(error)
            advice = "give the stage `environment: fairseq` (`make setup ENVIRONMENTS=fairseq`), or pip install fairseq"
            raise NotRunnable("missing", f"fairseq is not installed here ({words}): {advice}") from None
        if not trust_pickle:
            raise UserError(f"{path}: a checkpoint of fairseq can run code; if you trust it, say trust_pickle: true")
        given = {**({"data": data} if data else {}), **overrides}
        with unpickling():
            models, config, self.task = utils.load_model_ensemble_and_task([path], arg_overrides=given)
        self.model = models[0]
        self.generator = self.task.build_generator([self.model], getattr(config, "generation", config))

    def forward(self, src_tokens: torch.Tensor, src_lengths: torch.Tensor) -> Any:
        sample = {"net_input": {"src_tokens": src_tokens, "src_lengths": src_lengths}, "speaker": None}
        if hasattr(self.generator, "vocoder"):  # of speech
            return {"waveform": self.generator.generate(self.model, sample)[0]["waveform"]}
        return self.task.inference_step(self.generator, [self.model], sample, prefix_tokens=None, constraints=None)


def best(hypotheses: Any) -> Tuple[torch.Tensor, torch.Tensor]:
    """Convert hypotheses for the next stage: return the tokens (1, length) of the best one, and their length."""
    tokens = hypotheses[0][0]["tokens"].long()[None]
    return tokens, torch.tensor([tokens.shape[1]])
