"""Seconds of a training step, computed from sizes and rates: models without clocks, sockets or tensors."""
