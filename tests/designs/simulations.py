"""Each design once more, in one process and in plain NumPy, written from the papers and not from the library.

A rule says what becomes of one tensor on its way; `Feedback` keeps what a rule left out. Three loops show who runs the
optimizer: the server (`server_updates`), every worker on an average gradient (`workers_update`), every worker alone
with averages of weights in between (`workers_alone`). From the library come random numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernels.oracle import uniforms
from thinwire.codecs.scheme import random_key

Array = NDArray[np.float32]
Weights = dict[str, Array]
Gradients = Callable[[Weights, int, int], Weights]
"""(weights, rank, iteration) → that worker's gradients there."""
Rule = Callable[[Array, NDArray[np.float32]], Array]
"""(values, one uniform number in [0, 1) for each) → what arrives."""


# ---- rules


def plain(v: Array, u: Array) -> Array:
    return v


def three_values(sparsity: float) -> Rule:
    """3LC §3.1: m = s·max|v|, and v/m rounded to −1, 0, 1."""

    def rule(v: Array, u: Array) -> Array:
        m = np.float32(np.abs(v).max() * np.float32(sparsity))
        return np.where(np.abs(v) > m / 2, np.sign(v) * m, 0).astype(np.float32)

    return rule


def eight_bits(v: Array, u: Array) -> Array:
    """3LC §4.2, 8-bit int: 255 levels."""
    scale = np.float32(np.abs(v).max() / np.float32(127))
    levels: Array = np.clip(np.rint(v / scale), -127, 127).astype(np.float32) * scale
    return levels


def two_means(v: Array, u: Array) -> Array:
    """3LC §4.2, MQE 1-bit int: the mean of the values from 0 up, and that of the others."""
    up = v >= 0
    high = v[up].mean(dtype=np.float64) if up.any() else 0.0
    low = v[~up].mean(dtype=np.float64) if (~up).any() else 0.0
    return np.where(up, np.float32(high), np.float32(low))


def one_scale(v: Array, u: Array) -> Array:
    """DoubleSqueeze §5.1, 1-bit: ‖v‖₂ / √n with the signs; zero counts as positive."""
    scale = np.float32(np.sqrt(np.square(v, dtype=np.float64).mean()))
    return np.where(v >= 0, scale, -scale)


def largest(fraction: float) -> Rule:
    """The k values of largest magnitude; of equal ones the first."""

    def rule(v: Array, u: Array) -> Array:
        k = max(1, int(np.ceil(fraction * v.size)))
        flat = v.reshape(-1)
        chosen = np.argsort(-np.abs(flat), kind="stable")[:k]
        sent = np.zeros_like(flat)
        sent[chosen] = flat[chosen]
        return sent.reshape(v.shape)

    return rule


def from_threshold_up(fraction: float) -> Rule:
    """3LC §4.2, sparsification: what reaches the k-th largest magnitude of a sample; here the sample is everything."""

    def rule(v: Array, u: Array) -> Array:
        k = max(1, round(fraction * v.size))
        bound = np.sort(np.abs(v).reshape(-1))[-k]
        return np.where((np.abs(v) >= bound) & (v != 0), v, 0).astype(np.float32)

    return rule


def random_signs(v: Array, u: Array) -> Array:
    """3LC §4.2, stochastic 3-value: sign(v) with probability |v| / max|v|."""
    scale = np.abs(v).max()
    return np.where(u * scale < np.abs(v), np.sign(v) * scale, 0).astype(np.float32)


def random_signs_of_equal_norm(v: Array, u: Array) -> Array:
    """DoubleSqueeze §5.1, QSGD: the same trits, and the scale that keeps the norm."""
    trits = np.sign(random_signs(v, u))
    count = np.count_nonzero(trits)
    scale = np.sqrt(np.square(v, dtype=np.float64).sum() / count) if count else 0.0
    return (trits * np.float32(scale)).astype(np.float32)


def bins(c: float) -> Rule:
    """Øland & Raj §3–4: 2^N equal bins between the extremes, N = ceil(entropy of 16 bins + c); value = bin's centre."""

    def place(v: Array, bits: int) -> NDArray[np.int64]:
        low, high = float(v.min()), float(v.max())
        found = np.floor((v.astype(np.float64) - low) / (high - low) * 2**bits)
        clamped: NDArray[np.int64] = np.clip(found, 0, 2**bits - 1).astype(np.int64)
        return clamped

    def rule(v: Array, u: Array) -> Array:
        low, high = float(v.min()), float(v.max())
        shares = np.bincount(place(v, 4).reshape(-1)) / v.size
        entropy = -sum(share * np.log2(share) for share in shares if share)
        bits = int(np.ceil(entropy + c))
        centres: Array = (low + (high - low) * (place(v, bits) + 0.5) / 2**bits).astype(np.float32)
        return centres

    return rule


@dataclass
class Way:
    """One direction of one tensor: a rule, its residual where it keeps one, its random stream."""

    rule: Rule
    name: str
    residual: bool
    seed: int
    waiting: Any = 0.0
    count: int = 0

    def send(self, values: Array, count: int | None = None) -> Array:
        """What arrives. `count` is the number of the draw, by default how often this was called."""
        v = (values + self.waiting).astype(np.float32)
        draw = self.count if count is None else count
        u = uniforms(random_key(self.seed, self.name, draw), v.size).reshape(v.shape)
        sent = self.rule(v, u)
        if self.residual:
            self.waiting = v - sent
        self.count += 1
        return sent


@dataclass(frozen=True)
class Setting:
    """What all designs share."""

    start: Weights
    gradients: Gradients
    workers: int
    iterations: int
    compressed: frozenset[str]
    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-3

    def way(self, rule: Rule, name: str, residual: bool, rank: int | None) -> Way:
        """A worker's way up, or (None) the server's way down. All streams differ."""
        compressed = name in self.compressed
        return Way(rule if compressed else plain, name, residual and compressed, 65_536 if rank is None else rank)

    def ways(self, rule: Rule, residual: bool) -> list[dict[str, Way]]:
        """Every worker's ways up."""
        return [{name: self.way(rule, name, residual, rank) for name in self.start} for rank in range(self.workers)]


@dataclass
class Sgd:
    """Stochastic gradient descent with momentum and decay."""

    setting: Setting
    speed: dict[str, Array] = field(default_factory=dict)

    def step(self, name: str, weights: Array, gradient: Array) -> None:
        s = self.setting
        step = gradient + np.float32(s.decay) * weights
        before = self.speed.get(name)
        self.speed[name] = step if before is None else np.float32(s.momentum) * before + step
        weights -= np.float32(s.rate) * self.speed[name]


def mean(parts: list[Array]) -> Array:
    average: Array = np.mean(parts, axis=0, dtype=np.float32)
    return average


def copied(weights: Weights) -> Weights:
    return {name: values.copy() for name, values in weights.items()}


@dataclass
class Course:
    """What a design did: the workers' model after every iteration, and the server's own at the end."""

    models: list[Weights] = field(default_factory=list)
    server: Weights = field(default_factory=dict)


def server_updates(
    s: Setting, up: Rule, down: Rule, *, residual_up: bool, residual_down: bool, every: int = 1
) -> Course:
    """3LC §2–3: gradients up, the server updates its model, model deltas down. `every`: what accumulated is sent."""
    server, model = copied(s.start), copied(s.start)
    ways = s.ways(up, residual_up)
    down_ways = {name: s.way(down, name, False, None) for name in s.start}
    sgd, course = Sgd(s), Course()
    pending = [{name: np.zeros_like(values) for name, values in s.start.items()} for _ in range(s.workers)]
    for iteration in range(s.iterations):
        for rank in range(s.workers):
            for name, gradient in s.gradients(model, rank, iteration).items():
                pending[rank][name] += gradient
        if (iteration + 1) % every == 0:
            for name in s.start:
                before = server[name].copy()
                sgd.step(name, server[name], mean([ways[r][name].send(pending[r][name]) for r in range(s.workers)]))
                # With a residual, everything that the workers lack; without, this update alone.
                base = model[name] if residual_down else before
                model[name] += down_ways[name].send(server[name] - base, (iteration + 1) // every)
                for rank in range(s.workers):
                    pending[rank][name][:] = 0
        course.models.append(copied(model))
    course.server = server
    return course


def workers_update(s: Setting, up: Rule, down: Rule, *, residual_up: bool, residual_down: bool) -> Course:
    """DoubleSqueeze, algorithm 1: the average of what was sent, plus the server's residual, compressed again."""
    model, sgd, course = copied(s.start), Sgd(s), Course()
    ways = s.ways(up, residual_up)
    down_ways = {name: s.way(down, name, residual_down, None) for name in s.start}
    for iteration in range(s.iterations):
        gradients = [s.gradients(model, rank, iteration) for rank in range(s.workers)]
        for name in s.start:
            average = mean([ways[rank][name].send(gradients[rank][name]) for rank in range(s.workers)])
            sgd.step(name, model[name], down_ways[name].send(average))
        course.models.append(copied(model))
    return course


def terngrad(s: Setting, clip: float = 2.5) -> Course:
    """TernGrad §3: clipped, one scale for all workers, trits up, whole votes down; every worker updates."""
    model, sgd, course = copied(s.start), Sgd(s), Course()
    for iteration in range(s.iterations):
        gradients = [s.gradients(model, rank, iteration) for rank in range(s.workers)]
        for name in s.start:
            mine = [gradient[name] for gradient in gradients]
            if name not in s.compressed:
                sgd.step(name, model[name], mean(mine))
                continue
            limits = [min(np.float32(clip * g.astype(np.float64).std()), np.abs(g).max()) for g in mine]
            scale = np.float32(max(limits))
            votes = np.zeros(mine[0].shape, np.int64)
            for rank, (gradient, limit) in enumerate(zip(mine, limits, strict=True)):
                u = uniforms(random_key(rank, name, iteration), gradient.size).reshape(gradient.shape)
                kept = u * scale < np.minimum(np.abs(gradient), limit)
                votes += (np.sign(gradient) * kept).astype(np.int64)
            sgd.step(name, model[name], (scale * votes / s.workers).astype(np.float32))
        course.models.append(copied(model))
    return course


def workers_alone(s: Setting, rule: Rule, *, every: int) -> Course:
    """Øland & Raj §2: all train by themselves, and every so often take the average of their decoded weights."""
    models = [copied(s.start) for _ in range(s.workers)]
    sgds, course = [Sgd(s) for _ in range(s.workers)], Course()
    ways, down = s.ways(rule, False), {name: s.way(rule, name, False, None) for name in s.start}
    for iteration in range(s.iterations):
        for rank, model in enumerate(models):
            for name, gradient in s.gradients(model, rank, iteration).items():
                sgds[rank].step(name, model[name], gradient)
        if (iteration + 1) % every == 0:
            for name in s.start:
                average = down[name].send(mean([ways[r][name].send(models[r][name]) for r in range(s.workers)]))
                for model in models:
                    model[name][...] = average
        course.models.append(copied(models[0]))
    return course
