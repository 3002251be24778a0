"""The exchange among equal ranks, sans-IO: every rank is the server of its own shard.

residuals   what this rank has not sent yet, by parameter name and slice
shard       the arithmetic of one rank's shard of a bucket group, both passes
exchange    one bucket group in one step: packets in, packets out
cut         tensors cut along a dimension, as FSDP's shards are, and their residuals as whole tensors
core        which buckets travel together, and steps that all ranks skip
"""
