# transformers 5.23.0, tdt_loss: reduction="mean" divides by the target length, so an empty transcript makes it inf.
import torch
from transformers.loss.loss_tdt import tdt_loss

logits = torch.randn(2, 4, 2, 6)
lengths, targets = (torch.tensor([4, 4]), torch.tensor([1, 0])), torch.tensor([[1], [0]])
for name in ("mean_batch", "mean"):
    loss = tdt_loss(logits[..., :4], logits[..., 4:], targets, *lengths, 0, [0, 1], reduction=name)
    print(name, loss.isfinite().item())  # prints mean False
