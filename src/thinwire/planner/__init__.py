"""What a step of training takes, computed from sizes and rates: models without clocks, sockets or tensors."""
