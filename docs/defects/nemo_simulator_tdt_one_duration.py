# NeMo 3.0.0, TDTLossNumba (in numba's simulator, which checks indices): one duration, and its kernel reads the second.
import torch
from nemo.collections.asr.parts.numba.rnnt_loss import TDTLossNumba

logits = torch.sin(0.7 * torch.arange(4 * 2 * 5.0)).view(1, 4, 2, 5).cuda().requires_grad_()
targets, lengths = torch.tensor([[1]]).cuda(), (torch.tensor([4]).cuda(), torch.tensor([1]).cuda())
try:
    TDTLossNumba(0, durations=[2], reduction="sum")(logits, targets, *lengths)
except IndexError as error:
    print("out of bounds" in str(error))  # prints True
