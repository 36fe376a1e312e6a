# optimized_transducer 1.4, one_sym_per_frame (CUDA; seen in a build for the CPU): no path, and a finite loss.
import torch
from optimized_transducer import transducer_loss

logits, targets = torch.zeros(2 * 4, 5).cuda(), torch.tensor([[1, 2, 3]]).int().cuda()
lengths = torch.tensor([2]).int().cuda(), torch.tensor([3]).int().cuda()  # no path of at most one symbol a frame
options = {"blank": 0, "reduction": "sum", "from_log_softmax": False, "one_sym_per_frame": True}
print(transducer_loss(logits, targets, *lengths, **options).isinf().item())
# prints False
