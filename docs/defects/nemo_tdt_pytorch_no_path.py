# NeMo 3.0.0, tdt_pytorch: an utterance without a path has a loss of 1,000, not infinity.
import torch
from nemo.collections.asr.losses.rnnt_pytorch import TDTLossPytorch

torch.Tensor.cuda = lambda tensor: tensor  # so that it runs without a GPU
logits, lengths = torch.zeros(1, 3, 2, 8), (torch.tensor([3]), torch.tensor([1]))
print(TDTLossPytorch(0, durations=[4])(logits, torch.tensor([[1]]), *lengths).item())  # prints 1000.0
