# warp_rnnt 0.7.0, rnnt_loss (CUDA; seen in a build for the CPU): a backward scales the gradient that the next one gets.
import torch
from warp_rnnt import rnnt_loss

log_probs = torch.zeros(1, 3, 3, 5).log_softmax(-1).cuda().requires_grad_()
targets = torch.tensor([[1, 2]], dtype=torch.int32).cuda()
lengths = (torch.tensor([3], dtype=torch.int32).cuda(), torch.tensor([2], dtype=torch.int32).cuda())
loss = 2 * rnnt_loss(log_probs, targets, *lengths, reduction="sum")
first, second = (torch.autograd.grad(loss, log_probs, retain_graph=True)[0].sum().item() for _ in range(2))
print(round(second / first))  # prints 2
