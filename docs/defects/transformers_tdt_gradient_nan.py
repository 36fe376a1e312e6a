# transformers 5.23.0, tdt_loss: with durations other than 0, 1, 2, ... the loss is right and the gradient is NaN.
import torch
from transformers.loss.loss_tdt import tdt_loss

logits = torch.randn(1, 6, 4, 9, requires_grad=True)
lengths, targets = (torch.tensor([6]), torch.tensor([3])), torch.tensor([[1, 2, 3]])
loss = tdt_loss(logits[..., :5], logits[..., 5:], targets, *lengths, 0, [1, 2, 3, 4], reduction="sum")
loss.backward()
print(loss.isfinite().item(), logits.grad.isnan().any().item())  # prints True True
