# NeMo 3.0.0, tdt_pytorch: its sums start at -1000, so no loss is above 1,000 nats, and its gradient is then 0.
import torch
from nemo.collections.asr.losses.rnnt_pytorch import TDTLossPytorch

torch.Tensor.cuda = lambda tensor: tensor  # so that it runs without a GPU
logits = (4000 * torch.sin(0.7 * torch.arange(8 * 7 * 7.0))).view(1, 8, 7, 7).requires_grad_()
targets, lengths = torch.tensor([[1, 2, 3] * 2]), (torch.tensor([8]), torch.tensor([6]))
loss = TDTLossPytorch(0, durations=[0, 1, 2])(logits, targets, *lengths)  # it is 5,436.4 nats
loss.backward()
print(loss.item() > 1000, logits.grad.abs().sum().item())  # prints False 0.0
