"""Loaded once, in the server that test ranks are forked from: what every rank would otherwise load again."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import torch
import torch._dynamo  # DistributedDataParallel imports it when it is made, in about a second

import tests.hooks.ddp_ranks  # noqa: F401
import thinwire as tw

with suppress(tw.ConfigError):  # of a torch that the FSDP2 hook does not take
    import_module("thinwire.hooks.fsdp")  # FSDP2 and DTensor load in another second
for _codec in (tw.codec("3lc"), tw.codec("3lc", entropy="zstd"), tw.codec("int8")):
    for _dtype in (torch.float32, torch.float64):
        _context = _codec.context(torch.zeros(4096, dtype=_dtype))
        _out = torch.zeros(4096, dtype=_dtype)
        tw.decode(_context.encode(torch.ones(4096, dtype=_dtype)), out=_out, accumulate=True)
        tw.decode(_context.encode(torch.ones(4096, dtype=_dtype)), out=_out)
