"""One thread per test process: several processes with several threads each spend their time waiting for each other."""

import torch

torch.set_num_threads(1)
