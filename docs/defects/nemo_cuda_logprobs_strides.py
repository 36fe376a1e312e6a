# NeMo 3.0.0, rnnt_logprobs_triton (CUDA; seen in Triton's interpreter): reads any upstream gradient as contiguous.
import torch
from nemo.collections.asr.parts.k2.rnnt_logprobs_triton import rnnt_logprobs_triton

logits, targets = torch.sin(0.7 * torch.arange(4 * 3 * 5.0)).view(1, 4, 3, 5).cuda(), torch.tensor([[1, 2]]).cuda()
columns, gradients = torch.sin(torch.arange(24.0)).view(1, 4, 3, 2).cuda().unbind(-1), []
for upstream in (columns, [column.contiguous() for column in columns]):
    leaf = logits.clone().requires_grad_()
    gradients += torch.autograd.grad(rnnt_logprobs_triton(leaf, targets, 0), leaf, upstream)
print(torch.allclose(*gradients))  # prints False
