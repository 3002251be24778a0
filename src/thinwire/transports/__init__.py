"""Moves packets, which are bytes that it does not interpret, between processes.

`base` is the interface. `memory` runs a cluster in one process, `grpc` connects machines, `links` limits a link's rate.
"""
