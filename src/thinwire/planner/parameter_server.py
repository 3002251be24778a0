"""How long a synchronous step takes with parameter servers, from layer sizes, rates and seconds of computing.

All workers are alike, so one of them is followed through its step, layer by layer, and what the others do shows in the
servers: their links and processors serve every worker. Each resource (a worker's processor, its link up and down, a
server's link in and out, a server's processor) takes what comes to it in order, one thing at a time. A layer's gradient
leaves when the backward pass has produced it, unless the design sends all at the end; its update is waited for when the
next forward pass comes to it (wait-free back-propagation; Wu 2018, §2.3.2, figure 2.4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError

STEPS = 8
"""Steps that are followed: a pipeline is filled after two or three, and the last one's length is the answer."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What travels and is computed together: one layer, or one tensor.

    Args:
        name: of the layer.
        forward_s: of one worker's forward pass, in seconds of a processor.
        backward_s: of its backward pass.
        encode_s: of encoding its gradient, at the worker.
        decode_s: of decoding and applying its update, at the worker.
        push_nbytes: from a worker to the server, as it travels.
        pull_nbytes: from the server to a worker.
        server_push_s: of the server's processor for one worker's gradient: decode and add.
        server_update_s: of the server's processor for one update, encoded once for all.
        shard: the server that holds it.
    """

    name: str
    forward_s: float
    backward_s: float
    push_nbytes: float
    pull_nbytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    server_push_s: float = 0.0
    server_update_s: float = 0.0
    shard: int = 0


@dataclass(frozen=True, kw_only=True)
class Link:
    """One process's link.

    Args:
        bytes_per_s: that it carries, the same both ways; infinity is no limit.
        latency_s: from the last byte sent to the message in the other program's hands, in seconds.
    """

    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.latency_s >= 0:
            raise ConfigError(f"{self}: a rate is positive, in bytes a second, and a latency is 0 or more")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers and servers, and the links between them.

    Args:
        workers: how many, all alike.
        shards: how many servers; every layer's `shard` is below it.
        worker_link: of each worker.
        server_link: of each server.
        cores: processors that all processes share; None: each process has one of its own.
        overlap: gradients leave during the backward pass; otherwise all leave at its end, and all updates are waited
            for before the next forward pass begins (traditional back-propagation).

    Raises:
        ConfigError: a number below 1.
    """

    workers: int
    worker_link: Link
    server_link: Link
    shards: int = 1
    cores: int | None = None
    overlap: bool = True

    def __post_init__(self) -> None:
        if min(self.workers, self.shards, self.cores or 1) < 1:
            raise ConfigError(f"{self.workers} workers, {self.shards} shards and {self.cores} cores; all are 1 or more")


def step_s(layers: Sequence[Layer], cluster: Cluster) -> float:
    """Returns the seconds of one step, with all pipelines full.

    Args:
        layers: from the input to the output.
        cluster: where they are trained.

    Raises:
        ConfigError: no layers, or a layer on a shard that is not there.

    Example:
        Three layers as in Wu's figure 2.4: 11 units of time with overlap, and 13 without it, because updates come back
        while other gradients still leave (15 in the figure, where nothing is received before all is sent).

        >>> wire = Link(bytes_per_s=1.0)
        >>> layers = [Layer(name=str(i), forward_s=1, backward_s=2, push_nbytes=1, pull_nbytes=1) for i in range(3)]
        >>> one = dict(workers=1, worker_link=wire, server_link=Link())
        >>> step_s(layers, Cluster(**one, overlap=False)), step_s(layers, Cluster(**one))
        (13.0, 11.0)
    """
    if not layers:
        raise ConfigError("no layers; a step has at least one")
    if (highest := max(layer.shard for layer in layers)) >= cluster.shards:
        raise ConfigError(f"a layer lies on shard {highest}, and there are {cluster.shards}: shards count from 0")
    timeline = _Timeline(layers, cluster)
    ends = [timeline.step() for _ in range(STEPS)]
    return ends[-1] - ends[-2]


class _Timeline:
    """When every resource is free again, in seconds from the beginning."""

    def __init__(self, layers: Sequence[Layer], cluster: Cluster) -> None:
        self._layers, self._cluster = layers, cluster
        # Workers that share too few cores take turns, and each of them then seems slower.
        self._stretch = 1.0 if cluster.cores is None else max(1.0, cluster.workers / cluster.cores)
        self._worker = self._up = self._down = 0.0
        self._in = [0.0] * cluster.shards
        self._processor = [0.0] * cluster.shards
        self._out = [0.0] * cluster.shards
        self._updated = [0.0] * len(layers)

    def step(self) -> float:
        """Follows one step; returns when its backward pass is over."""
        overlap = self._cluster.overlap
        if not overlap:
            self._worker = max(self._worker, *self._updated)
        for index, layer in enumerate(self._layers):
            self._worker = max(self._worker, self._updated[index])
            self._worker += self._stretch * (layer.decode_s + layer.forward_s)
        backward = range(len(self._layers) - 1, -1, -1)
        for index in backward:
            self._worker += self._stretch * (self._layers[index].backward_s + self._layers[index].encode_s)
            if overlap:
                self._exchange(index)
        if not overlap:
            for index in backward:
                self._exchange(index)
        return self._worker

    def _exchange(self, index: int) -> None:
        """Sends a layer's gradients, of all workers, updates it, and sends the update to all."""
        layer, cluster = self._layers[index], self._cluster
        shard, worker, server = layer.shard, cluster.worker_link, cluster.server_link
        begins = max(self._worker, self._up)
        self._up = begins + layer.push_nbytes / worker.bytes_per_s
        # The bytes of all workers flow through both links at once; the slower of the two says when the last is in.
        self._in[shard] = max(self._in[shard], begins) + cluster.workers * layer.push_nbytes / server.bytes_per_s
        arrived = max(self._up, self._in[shard]) + worker.latency_s + server.latency_s
        # Gradients are added as they come: the server is behind by one of them when the last is in.
        busy = cluster.workers * layer.server_push_s
        free = max(self._processor[shard], begins) + busy
        self._processor[shard] = max(free, arrived + layer.server_push_s) + layer.server_update_s
        begins = max(self._processor[shard], self._out[shard])
        self._out[shard] = begins + cluster.workers * layer.pull_nbytes / server.bytes_per_s
        self._down = max(self._down, begins) + layer.pull_nbytes / worker.bytes_per_s
        self._updated[index] = max(self._out[shard], self._down) + worker.latency_s + server.latency_s
