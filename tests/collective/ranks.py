"""All ranks of an exchange in one process, with neither threads nor sockets: packets wait in a list."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import thinwire as tw
from thinwire.collective.core import Bucket, Collective
from thinwire.collective.exchange import Exchange, Pass, Send
from thinwire.collective.residuals import Residuals
from thinwire.collective.trained import TrainedTensor
from thinwire.policies.compression import PLAIN, Choice

SIZES = {"w": 30_000, "bias": 70, "small": 900}


def tensors(
    codec: tw.Codec, sizes: Mapping[str, int] = SIZES, device: torch.device | None = None, down: tw.Codec | None = None
) -> list[TrainedTensor]:
    """A large, an uncompressed and a small tensor; only `bias` is uncompressed."""
    return [
        TrainedTensor(
            name,
            size,
            torch.float32,
            Choice(PLAIN, PLAIN) if name == "bias" else Choice(codec, down or codec),
            device or torch.device("cpu"),
        )
        for name, size in sizes.items()
    ]


def collectives(trained: Sequence[TrainedTensor], world: int, **options: Any) -> list[Collective]:
    """Every rank's core."""
    mean, of_senders = options.pop("mean", True), options.pop("of_senders", False)
    given = {"skip": False, "drop_zeros": False, "group_nbytes": 0, **options}
    of_rank = [Residuals(trained, rank, world, mean=mean, seed=0, of_senders=of_senders) for rank in range(world)]
    return [Collective(each, **given) for each in of_rank]


def bucket_of(sizes: Mapping[str, int] = SIZES) -> Bucket:
    """One bucket with these tensors, end to end."""
    offsets, at = [], 0
    for name, size in sizes.items():
        offsets.append((name, at))
        at += size
    return Bucket(tuple(offsets), 4 * at)


def play(exchanges: Sequence[Exchange], values: Sequence[Any], seed: int | None = None) -> list[Send]:
    """Carries out one exchange on every rank.

    Args:
        exchanges: of each rank.
        values: of each rank, one bucket's; they change in place.
        seed: of the order in which packets arrive; None delivers them as they were sent.

    Returns:
        Everything that was sent.
    """
    order = random.Random(seed)
    under_way: list[tuple[int, Send]] = []
    sent: list[Send] = []

    def post(rank: int, sends: list[Send]) -> None:
        under_way.extend((rank, send) for send in sends)
        sent.extend(sends)

    to_push = list(range(len(exchanges)))
    pulled = set()
    while to_push or under_way:
        # A rank may hear of others before it has a gradient itself.
        if to_push and (seed is None or not under_way or order.random() < 0.3):
            rank = to_push.pop(0)
            post(rank, exchanges[rank].push([values[rank]]))
        else:
            rank, send = under_way.pop(0 if seed is None else order.randrange(len(under_way)))
            exchanges[send.peer].receive(rank, send.way, memoryview(bytes(send.packet) + b"\xff" * 9))
        for rank, exchange in enumerate(exchanges):
            if rank not in to_push and exchange.pulls and exchange.pushed and rank not in pulled:
                pulled.add(rank)
                post(rank, exchange.pull())
    assert all(exchange.complete for exchange in exchanges)
    return sent


def step(
    cores: Sequence[Collective], bucket: Bucket, gradients: Sequence[Any], number: int = 0, seed: int | None = None
) -> list[Any]:
    """One step of one bucket on every rank; returns every rank's averages."""
    ready = [core.bucket_ready(bucket, number, 0, last=True) for core in cores]
    exchanges = [exchange for [(exchange, _)] in ready]
    values = [gradient.clone() if isinstance(gradient, torch.Tensor) else gradient.copy() for gradient in gradients]
    for core, exchange in zip(cores, exchanges, strict=True):
        core.started(exchange)
    play(exchanges, values, seed)
    for core, exchange in zip(cores, exchanges, strict=True):
        core.finished(exchange)
    return values


def gradients(world: int, seed: int, sizes: Mapping[str, int] = SIZES) -> list[Any]:
    """Every rank's gradient of one bucket."""
    draw = np.random.default_rng(seed)
    return [draw.standard_normal(sum(sizes.values())).astype(np.float32) for _ in range(world)]


__all__ = ["SIZES", "Pass", "bucket_of", "collectives", "gradients", "play", "step", "tensors"]
