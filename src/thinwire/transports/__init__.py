"""Moves packets, which are bytes, between processes and knows nothing of their meaning.

`base` is the contract. `memory` runs a whole cluster in one process, `grpc` crosses machines, `links` makes one thin.
"""
