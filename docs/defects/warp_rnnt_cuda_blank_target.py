# warp_rnnt 0.7.0, rnnt_loss (CUDA; seen in a build for the CPU): a target that is the blank gives a wrong gradient.
import torch
from warp_rnnt import rnnt_loss

logits = torch.sin(0.7 * torch.arange(3 * 3 * 5.0)).view(1, 3, 3, 5).cuda()
log_probs = logits.log_softmax(-1).requires_grad_()
lengths = (torch.tensor([3], dtype=torch.int32).cuda(), torch.tensor([2], dtype=torch.int32).cuda())
rnnt_loss(log_probs, torch.tensor([[1, 0]], dtype=torch.int32).cuda(), *lengths, blank=0, reduction="sum").backward()
print(round(-log_probs.grad.sum().item(), 3) == 5.0)  # prints False
# every path takes T + U = 5 symbols, so the posteriors have that sum, as they do with targets [[1, 2]]
