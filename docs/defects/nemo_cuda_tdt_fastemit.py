# NeMo 3.0.0, TDTLossNumba (CUDA; seen in numba's simulator): FastEmit leaves the gradient of durations as it is.
import torch
from nemo.collections.asr.parts.numba.rnnt_loss import TDTLossNumba

values, targets = torch.sin(0.7 * torch.arange(3 * 2 * 7.0)).view(1, 3, 2, 7).cuda(), torch.tensor([[1]]).cuda()
lengths, gradients = (torch.tensor([3]).cuda(), torch.tensor([1]).cuda()), []
for weight in (0.0, 0.5):
    loss = TDTLossNumba(0, durations=[0, 1, 2], reduction="sum", fastemit_lambda=weight)
    logits = values.clone().requires_grad_()
    gradients += torch.autograd.grad(loss(logits, targets, *lengths).sum(), logits)
print([torch.equal(*(gradient[..., columns] for gradient in gradients)) for columns in (slice(4), slice(4, 7))])
# prints [False, True]
