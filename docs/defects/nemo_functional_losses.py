# NeMo 3.0.0, tdt_loss and multiblank_rnnt_loss: the functions pass fewer arguments than their autograd functions take.
import torch
from nemo.collections.asr.parts.numba.rnnt_loss import rnnt_pytorch

arguments = torch.randn(1, 3, 2, 8), torch.tensor([[1]]), torch.tensor([3]), torch.tensor([1]), 0, [0, 1, 2]
for function in (rnnt_pytorch.tdt_loss, rnnt_pytorch.multiblank_rnnt_loss):
    try:
        function(*arguments)
    except TypeError as error:
        print("required positional argument" in str(error))  # prints True
