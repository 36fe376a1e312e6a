# NeMo 3.0.0, TDTLossNumba (CUDA; seen in numba's simulator): its log 0 is -10,000, so larger losses are wrong.
import torch
from nemo.collections.asr.parts.numba.rnnt_loss import TDTLossNumba

logits = (20000 * torch.sin(0.7 * torch.arange(8 * 7 * 7.0))).view(1, 8, 7, 7).cuda().requires_grad_()
targets, lengths = torch.tensor([[1, 2, 3] * 2]).cuda(), (torch.tensor([8]).cuda(), torch.tensor([6]).cuda())
loss = TDTLossNumba(0, durations=[0, 1, 2], reduction="sum")(logits, targets, *lengths)  # it is 27,182 nats
print(loss.item() > 20000)  # prints False
