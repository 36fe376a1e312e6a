# optimized_transducer 1.4, transducer_loss (CUDA and CPU): a backward scales the gradient that the next one gets.
import torch
from optimized_transducer import transducer_loss

logits = torch.zeros(9, 5).cuda().requires_grad_()  # 3 frames, 2 targets
targets = torch.tensor([[1, 2]], dtype=torch.int32).cuda()
lengths = (torch.tensor([3], dtype=torch.int32).cuda(), torch.tensor([2], dtype=torch.int32).cuda())
loss = 2 * transducer_loss(logits, targets, *lengths, 0, False, reduction="sum")
first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0].abs().sum().item() for _ in range(2))
print(round(second / first))  # prints 2
