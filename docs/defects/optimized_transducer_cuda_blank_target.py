# optimized_transducer 1.4, transducer_loss (CUDA and CPU): a target that is the blank gives a wrong gradient.
import torch
from optimized_transducer import transducer_loss

logits = torch.sin(0.7 * torch.arange(9 * 5.0)).view(9, 5).cuda().requires_grad_()  # 3 frames, 2 targets
lengths = (torch.tensor([3], dtype=torch.int32).cuda(), torch.tensor([2], dtype=torch.int32).cuda())
loss = transducer_loss(logits, torch.tensor([[1, 0]], dtype=torch.int32).cuda(), *lengths, 0, False, reduction="sum")
loss.backward()
print(logits.grad.sum().abs().item() < 1e-4)  # prints False
# the gradient through a softmax has the sum 0, as it does with targets [[1, 2]]
