"""3LC on what models are made of: one small tensor, and a list of tensors on one thread and on two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from thinwire.bench.timing import Candidate, race
from thinwire.codecs import codec as make_codec
from thinwire.codecs import decode

SMALL = 10_000


def resnet50_sizes() -> list[int]:
    """Numbers of values of ResNet-50's 161 parameters, 25,557,032 together (He et al., table 1)."""
    sizes = [64 * 3 * 49, 64, 64]
    inside = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [
                inside * width,
                width,
                width,
                width * width * 9,
                width,
                width,
                width * width * 4,
                width * 4,
                width * 4,
            ]
            if block == 0:
                sizes += [inside * width * 4, width * 4, width * 4]
            inside = width * 4
    return [*sizes, 2048 * 1000, 1000]


def small_tensors(turns: int = 200) -> dict[str, float]:
    """Microseconds matter here: a model has many small tensors. Encode with residual, through the public API."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SMALL, generator=generator)
    context = make_codec("3lc").context(values)
    frame, out = make_codec("3lc").encode(values), torch.zeros(SMALL)
    seconds = race(
        [
            Candidate("encode", lambda: context.encode(values)),
            Candidate("decode", lambda: decode(frame, out=out)),
            Candidate("add", lambda: torch.add(values, out, out=out)),
        ],
        turns=turns,
        calls=10,
    )
    return {"elements": SMALL, **seconds, "encode_vs_add": seconds["encode"] / seconds["add"]}


def tensor_list(turns: int = 9) -> dict[str, float]:
    """ResNet-50's list: every tensor encoded with its residual, by one thread and by two that share the list."""
    generator = np.random.default_rng(0)
    tensors = [torch.from_numpy(generator.standard_normal(size, dtype=np.float32)) for size in resnet50_sizes()]
    copies = [np.empty(tensor.numel(), np.float32) for tensor in tensors]
    contexts = [make_codec("3lc").context(tensor) for tensor in tensors]
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].numel())
    # Largest first onto the thread with less to do.
    shares: tuple[list[int], list[int]] = ([], [])
    loads = [0, 0]
    for index in order:
        lighter = loads.index(min(loads))
        shares[lighter].append(index)
        loads[lighter] += tensors[index].numel()

    def encode(indices: list[int]) -> None:
        for index in indices:
            contexts[index].encode(tensors[index])

    def copy() -> None:
        for tensor, target in zip(tensors, copies, strict=True):
            np.copyto(target, tensor.numpy())

    with ThreadPoolExecutor(2) as pool:
        seconds = race(
            [
                Candidate("one", lambda: encode(order)),
                Candidate("two", lambda: list(pool.map(encode, shares))),
                Candidate("memcpy", copy),
            ],
            turns=turns,
        )
    return {
        "tensors": len(tensors),
        "elements": sum(tensor.numel() for tensor in tensors),
        **seconds,
        "encode_vs_memcpy": seconds["memcpy"] / seconds["one"],
        "two_threads": seconds["one"] / seconds["two"],
    }
