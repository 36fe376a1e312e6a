"""A checkpoint of fairseq as a stage, called as fairseq's own benchmark calls it; fairseq is needed
only when it runs.

stage1:
  factory: fairseq_stage.py:Generation
  converter: fairseq_stage.py:best
  python: /path/to/python3.10 # fairseq 0.12.2 imports under Python 3.10 and older
  arguments: {path: model.pt, data: data-bin, trust_pickle: true}
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from rnnt_bench.core.errors import NotRunnable, UserError

#: torch.load reads it at each call that does not say weights_only, as fairseq's do not.
TRUSTING = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class Generation(nn.Module):
    """Run a checkpoint with the generator of its task: (src_tokens, src_lengths) to what the
    generator gives.

    Args:
        path: of the checkpoint.
        data: the task's folder, with its dictionaries.
        trust_pickle: has to be true, since a checkpoint of fairseq is a pickle and can run code.
        overrides: of the checkpoint's arguments.
    """

    def __init__(
        self, path: str, data: str | None = None, trust_pickle: bool = False, **overrides: Any
    ):
        super().__init__()
        try:
            from fairseq.checkpoint_utils import load_model_ensemble_and_task
        except ImportError as error:
            advice = "name a Python that has it as `python` of the stage: pip install fairseq==0.12.2 (Python 3.10)"
            raise NotRunnable(
                "missing", f"fairseq is not installed here ({error}); {advice}"
            ) from None
        if not trust_pickle:
            raise UserError(
                f"{path}: a checkpoint of fairseq can run code; if you trust it, say trust_pickle: true"
            )
        overrides = {**({"data": data} if data else {}), **overrides}
        before = os.environ.get(TRUSTING)
        os.environ[TRUSTING] = "1"
        try:
            models, config, self.task = load_model_ensemble_and_task(
                [path], arg_overrides=overrides
            )
        finally:
            os.environ.pop(TRUSTING)
            os.environ.update({TRUSTING: before} if before is not None else {})
        self.model = models[0]
        self.generator = self.task.build_generator(
            [self.model], getattr(config, "generation", config)
        )

    def forward(self, src_tokens: torch.Tensor, src_lengths: torch.Tensor) -> Any:
        sample = {
            "net_input": {"src_tokens": src_tokens, "src_lengths": src_lengths},
            "speaker": None,
        }
        if hasattr(self.generator, "vocoder"):  # of speech
            return {"waveform": self.generator.generate(self.model, sample)[0]["waveform"]}
        return self.task.inference_step(
            self.generator, [self.model], sample, prefix_tokens=None, constraints=None
        )


def best(hypotheses: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert hypotheses for the next stage: the tokens (1, length) of the best one, and their
    length (1,)."""
    tokens = hypotheses[0][0]["tokens"].long()[None]
    return tokens, torch.tensor([tokens.shape[1]])
