"""Several processes that prune one model together, over torch.distributed."""
