"""The work of a tensor's owner, and the exchange among equal ranks, each the owner of its shard. Sans-IO.

owned_shard received gradients at their owner, a rank or a server: inbox, sums in rank order, means
membership  the expected ranks, and the number of gradients that complete a clock
residuals   this rank's unsent values, by parameter name and slice
shard       the slices of one rank's shard of a bucket group, and their frames
exchange    one bucket group in one step: packets in, packets out
cut         tensors cut along a dimension, as FSDP's shards are, and their residuals as whole tensors
core        groups of buckets that share an exchange, and steps that all ranks skip
"""
