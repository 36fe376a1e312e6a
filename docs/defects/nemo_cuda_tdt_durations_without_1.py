# NeMo 3.0.0, TDTLossNumba (CUDA; seen in numba's simulator): without a duration of 1 the gradient is wrong.
import torch
from nemo.collections.asr.parts.numba.rnnt_loss import TDTLossNumba

logits = torch.sin(0.7 * torch.arange(5 * 3 * 7.0)).view(1, 5, 3, 7).cuda().requires_grad_()
targets, lengths = torch.tensor([[1, 2]]).cuda(), (torch.tensor([5]).cuda(), torch.tensor([2]).cuda())
TDTLossNumba(0, durations=[0, 2, 3], reduction="sum")(logits, targets, *lengths).sum().backward()
print(bool((logits.grad[..., :4].sum(-1).abs() < 1e-3).all()))  # prints False
# Gradients of the logits of a softmax sum to 0.  Its backward sums start at durations[0] or durations[1] if that is 1.
