"""The multiply-accumulates that SUPERB's profiler counts beyond the real ones.

Source: the fork of DeepSpeed's profiler for the SUPERB challenge at SLT 2022 (B06901052/DeepSpeed, branch
superb-challenge, flops_profiler/profiler.py).  Its formula of torch.nn.functional.multi_head_attention_forward takes
for MACs, one each, the biases of the three projections and the scaling of the queries.  Per score it adds the mask
(given or not), two of the softmax, and the dropout where its probability is above 0 (in evaluation too).  All its
other formulas that HuBERT and wav2vec 2.0 meet agree with ours.  It does not know scaled_dot_product_attention, which
newer models call: that is counted as what fairseq called in its place, with dropout.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

NAME = "superb::attention"


class Attention(TorchFunctionMode):
    """Call `counted(name, macs)` for each attention; functions inside it are its own."""

    def __init__(self, counted: Callable[[str, int], None]):
        super().__init__()
        self._counted = counted

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            self._counted(NAME, _multi_head(*args, **kwargs))
        elif func is F.scaled_dot_product_attention:
            query, key, value = (args + tuple(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
            scores = query.numel() // query.shape[-1] * key.shape[-2]
            self._counted(NAME, 2 * query.numel() + key.numel() + value.numel() + 4 * scores)
        return func(*args, **kwargs)


def _multi_head(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    *_: Any,
    **__: Any,
) -> int:
    """Count one attention.  query, key, value: (T, N, E), or (T, E)."""
    batch = query.shape[1] if query.dim() == 3 else 1
    scores = batch * num_heads * query.shape[0] * key.shape[0]
    biases = 0 if in_proj_bias is None else query.numel() + key.numel() + value.numel()
    return biases + query.numel() + (3 + (dropout_p > 0)) * scores
