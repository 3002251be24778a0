"""Øland & Raj's experiment (§3, §5) through server and workers: whole weights averaged once an epoch.

Five workers with 800 images each, a 784-392-50-10 network with tanh to the end, half the squared error against ±1,
plain SGD at .2·.96^epoch with an ℓ1 penalty of 1e-4, 60 epochs. The images are MNIST's, and Fashion-MNIST's without it.
With the mean over the ten outputs in place of half their sum, steps are a fifth as large and 4 bits stand still.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

import thinwire as tw
from thinwire.codecs.entropy import Entropy
from thinwire.policies.designs import design as find_design
from thinwire.runtime.serving import serving
from thinwire.server.core import ServerCore
from thinwire.transports.memory import MemoryServer
from thinwire_lab.workloads.data import data, datasets
from thinwire_lab.workloads.models import model as make_model

IMAGES = min((info.name for info in datasets() if info.name.endswith("mnist") and info.present), key=len, default="")
"""MNIST's name is the shorter one; empty where neither is here."""
WORKERS, BATCH, EPOCHS = 5, 20, 60
TRAIN, TEST = 4000, 1000
LAST = 10
L1 = 1e-4
MATRICES, VECTORS = 327_428, 452


@dataclass(frozen=True)
class WeightsOutcome:
    """Percent of the test images, mean of the last epochs; bits a value of the matrices; bins' bits before Huffman."""

    accuracy: float
    bits_up: float
    raw_bits: float


@functools.cache
def average_weights(name: str, seed: int, *, plain: bool = False) -> WeightsOutcome:
    """Trains with the design `name`; `plain` exchanges the same weights as floats."""
    torch.set_num_threads(1)
    steps = TRAIN // WORKERS // BATCH
    design = find_design(name, consistency=f"local[steps={steps}]")
    if plain:
        design = replace(design, up=tw.codec("fp32"), down=tw.codec("fp32"))
    dataset = data(IMAGES)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(dataset.train_x))[: TRAIN + TEST])
    pixels = dataset.train_x[order].float().div_(255)
    labels = dataset.train_y[order].long()
    targets = 2.0 * nn.functional.one_hot(labels, 10).float() - 1
    server = MemoryServer(serving(ServerCore()))
    workers = []
    for rank in range(WORKERS):
        model = make_model("mlp-tanh", num_classes=10, in_shape=dataset.in_shape, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                deviation = 0.25 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        workers.append(
            (
                model,
                tw.distribute(
                    model,
                    optimizer,
                    server=server.connect(),
                    rank=rank,
                    workers=WORKERS,
                    design=design,
                    seed=seed,
                ),
                np.random.default_rng([seed, rank, 1]),
            )
        )
    accuracies, raw = [], []

    def take_epoch(rank: int, epoch: int) -> None:
        model, opt, chance = workers[rank]
        shuffled = torch.from_numpy(chance.permutation(TRAIN // WORKERS))
        for group in opt.param_groups:
            group["lr"] = 0.2 * 0.96**epoch
        for step in range(steps):
            rows = rank * (TRAIN // WORKERS) + shuffled[step * BATCH : (step + 1) * BATCH]
            opt.zero_grad()
            penalty = sum(parameter.abs().sum() for parameter in model.parameters() if parameter.ndim > 1)
            loss = (model(pixels[rows]).tanh() - targets[rows]).square().sum(1).mean() / 2 + L1 * penalty
            loss.backward()
            opt.step()

    pool = ThreadPoolExecutor(WORKERS)  # at the end of an epoch everybody waits for everybody
    for epoch in range(EPOCHS):
        list(pool.map(take_epoch, range(WORKERS), [epoch] * WORKERS))
        if isinstance(design.up.scheme, Entropy):
            raw.append(raw_bits(design.up.scheme, workers[0][0]))
        for _, opt, _ in workers:
            opt.sync()
        model = workers[0][0]
        with torch.no_grad():
            right = (model(pixels[TRAIN:]).argmax(1) == labels[TRAIN:]).float().mean()
        accuracies.append(100 * float(right))
    pushed = sum(opt.traffic()["payload_bytes_push"] for _, opt, _ in workers)
    pool.shutdown()
    for _, opt, _ in workers:
        opt.close()
    server.stop()
    exchanges = EPOCHS * WORKERS
    return WeightsOutcome(
        accuracy=float(np.mean(accuracies[-LAST:])),
        bits_up=(8 * pushed / exchanges - 32 * VECTORS) / MATRICES,
        raw_bits=float(np.mean(raw)) if raw else 32.0,
    )


def raw_bits(codec: Entropy, model: nn.Module) -> float:
    """Bits of a bin's number, mean over the matrices' values."""
    sizes = [(codec.num_bits(p.detach().numpy().reshape(-1)), p.numel()) for p in model.parameters() if p.ndim > 1]
    return sum(bits * numel for bits, numel in sizes) / sum(numel for _, numel in sizes)
