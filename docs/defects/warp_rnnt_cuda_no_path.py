# warp_rnnt 0.7.0, rnnt_loss (CUDA; seen in a build for the CPU): nan where no path is possible, not infinity.
import torch
from warp_rnnt import rnnt_loss

logits = torch.zeros(1, 4, 3, 5)
logits[..., 2] = -torch.inf  # the first target is masked in every cell
targets, lengths = torch.tensor([[2, 1]]).int().cuda(), (torch.tensor([4]).int().cuda(), torch.tensor([2]).int().cuda())
print(rnnt_loss(logits.log_softmax(-1).cuda(), targets, *lengths, reduction="sum").item())
# prints nan
