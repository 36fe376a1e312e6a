# torchaudio 2.11.0, rnnt_loss (CUDA): a wrong loss for an utterance of one frame, or without tokens.
import torch
from torchaudio.functional import rnnt_loss

for T, U in ((1, 3), (5, 0), (5, 3)):
    numbers = torch.randn(1, T, U + 1, 11), torch.ones(1, U).int(), torch.tensor([T]).int(), torch.tensor([U]).int()
    cpu, cuda = (rnnt_loss(*(x.to(device) for x in numbers), blank=0).item() for device in ("cpu", "cuda"))
    print(T, U, "equal" if abs(cpu - cuda) < 1e-3 else "different")
# prints 1 3 different
# prints 5 0 different
# prints 5 3 equal
