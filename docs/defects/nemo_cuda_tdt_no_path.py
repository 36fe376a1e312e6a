# NeMo 3.0.0, TDTLossNumba (CUDA; seen in numba's simulator): without a path the loss is 10,000, not infinity.
import torch
from nemo.collections.asr.parts.numba.rnnt_loss import TDTLossNumba

logits, targets = torch.zeros(1, 3, 2, 7).cuda(), torch.tensor([[1]]).cuda()
lengths = torch.tensor([3]).cuda(), torch.tensor([1]).cuda()
print(TDTLossNumba(0, durations=[4, 5], reduction="sum")(logits, targets, *lengths).item())  # prints 10000.0
