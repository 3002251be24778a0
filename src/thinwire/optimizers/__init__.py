"""Torch optimizers that run where the model is updated: on a shard, or at every worker."""
