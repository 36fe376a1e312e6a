"""The exact transducer (RNN-T) loss from encoder and decoder outputs and the output layer, without
the logits of all cells in memory."""

from fused_transducer import recipes
from fused_transducer.call import backend_of
from fused_transducer.functional import align, seconds, transducer_loss
from fused_transducer.modules import TDTLoss, TransducerLoss
from fused_transducer.windows import window_of

__all__ = [
    "TDTLoss",
    "TransducerLoss",
    "align",
    "backend_of",
    "recipes",
    "seconds",
    "transducer_loss",
    "window_of",
]
__version__ = "0.2.0"
