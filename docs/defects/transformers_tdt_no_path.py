# transformers 5.23.0, tdt_loss: one utterance without a path makes the gradient of the whole batch NaN.
import torch
from transformers.loss.loss_tdt import tdt_loss

logits = torch.randn(2, 3, 2, 6, requires_grad=True)
lengths, targets = (torch.tensor([3, 1]), torch.tensor([1, 1])), torch.tensor([[1], [2]])
losses = tdt_loss(logits[..., :4], logits[..., 4:], targets, *lengths, 0, [1, 2], reduction="none")
losses[losses.isfinite()].sum().backward()
print(losses.isinf().tolist(), logits.grad[1].isnan().any().item())  # prints [False, True] True
