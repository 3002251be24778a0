"""What the owner of tensors does, and the exchange among equal ranks, each the owner of its shard. Sans-IO.

owned_shard what an owner, a rank or a server, does with gradients that come in: inbox, sums in rank order, means
membership  which ranks are expected, and how many gradients complete a clock
residuals   what this rank has not sent yet, by parameter name and slice
shard       the slices of one rank's shard of a bucket group, and what travels of them
exchange    one bucket group in one step: packets in, packets out
cut         tensors cut along a dimension, as FSDP's shards are, and their residuals as whole tensors
core        which buckets travel together, and steps that all ranks skip
"""
