# warp_rnnt 0.7.0, rnnt_loss (CUDA; seen in a build for the CPU): reads behind the tensor where a length is too large.
import torch
from warp_rnnt import rnnt_loss

log_probs = torch.zeros(2, 3, 3, 5).log_softmax(-1).cuda()
targets = torch.tensor([[1, 2], [1, 2]], dtype=torch.int32).cuda()
U_lengths = torch.tensor([2, 2], dtype=torch.int32).cuda()
T_lengths = torch.tensor([4, 3], dtype=torch.int32).cuda()  # the tensor has 3 frames
loss = rnnt_loss(log_probs, targets, T_lengths, U_lengths, reduction="none")
print(loss.isfinite().all().item())  # prints True
