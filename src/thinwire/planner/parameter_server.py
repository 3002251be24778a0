"""How long a synchronous step takes with parameter servers, from layer sizes, rates and seconds of computing.

All workers are alike, so the last of them is followed through its step, layer by layer, and what the others do shows in
the servers: their links and processors serve every worker, one after the other, so that the first has its update, and
begins the next step, while the others' still leave. Each resource (a worker's processor, its link up and down, a
server's link in and out, a server's processor) takes what comes to it in order, one thing at a time. A layer's gradient
leaves when the backward pass has produced it, unless the design sends all at the end; its update is waited for when the
next forward pass comes to it (wait-free back-propagation; Wu 2018, §2.3.2, figure 2.4).

Without servers, in the collective mode, every worker is the server of its own share of every layer: a worker's link and
processor carry both parts, and the next forward pass begins when all updates are in, as DDP and FSDP have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError

SHARED_USE = 0.9
"""Of processors that all processes share, what lockstep leaves in use: the median of seven runs without a limit on the
link, four ranks on two cores (docs/results.md, DDP hooks), 0.85 to 0.96."""
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
        collective: there are no servers but the workers, each of a share of every layer; `shards` is then 1, and
            `server_link` means nothing.
        chunk_nbytes: a worker's gradients leave when so many bytes are ready for a server; 0: layer by layer.
        message_s: of a server's processor for a message that comes or leaves, in seconds; not counted in the
            collective mode.
        worker_message_s: of a processor for a message that comes to a worker or leaves it, in either mode. It is
            counted where cores are shared; else a worker's own threads do it beside what it computes.
        byte_s: of a processor for each byte of a message, at a server's end, and where cores are shared at a worker's;
            in the collective mode, where cores are shared, at either end.
        ring: in the collective mode messages go round a ring, as those of an all-reduce; else to all others and back.
        ring_hop_s: that all wait at each hop of a ring more than there, in seconds, where cores are shared.
        use: of processors that all share, what lockstep leaves in use.
        largest_share: in the collective mode, what of every layer is the worker's that has most of it; None: all have
            equal shares.

    Raises:
        ConfigError: a number below 1, or a chunk or seconds below 0, or a use that is not above 0 and at most 1, or a
            largest share below an equal one or above 1.
    """

    workers: int
    worker_link: Link
    server_link: Link
    shards: int = 1
    cores: int | None = None
    overlap: bool = True
    collective: bool = False
    chunk_nbytes: float = 0.0
    message_s: float = 0.0
    worker_message_s: float = 0.0
    byte_s: float = 0.0
    ring: bool = False
    ring_hop_s: float = 0.0
    use: float = SHARED_USE
    largest_share: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.use <= 1:
            raise ConfigError(f"use={self.use}; a share of the processors is above 0 and at most 1")
        if self.collective and self.shards != 1:
            raise ConfigError(f"{self.shards} shards in the collective mode, which has no servers; leave it at 1")
        costs = self.chunk_nbytes, self.message_s, self.worker_message_s, self.byte_s, self.ring_hop_s
        if not all(each >= 0 for each in costs):  # nor NaN, which `min` may pass over
            raise ConfigError(
                f"chunks of {self.chunk_nbytes} bytes, {self.message_s} and {self.worker_message_s} s a message, "
                f"{self.byte_s} s a byte, {self.ring_hop_s} s a hop; all are 0 or more"
            )
        if min(self.workers, self.shards, self.cores or 1) < 1:
            raise ConfigError(f"{self.workers} workers, {self.shards} shards and {self.cores} cores; all are 1 or more")
        if self.largest_share is not None and not 1 / self.workers <= self.largest_share <= 1:
            raise ConfigError(f"a largest share of {self.largest_share}; of {self.workers} workers it is 1/N to 1")

    @property
    def exchange_s(self) -> float:
        """What an exchange's messages take of a worker's processor, in seconds."""
        # Among equals: one to and one from every other rank, and the same for what they have added up.
        return self.worker_message_s * (4 * (self.workers - 1) if self.collective else 2)

    @property
    def more_hops(self) -> int:
        """How many hops an exchange has more than the two to all others and back."""
        # Round a ring, N − 1 with parts and N − 1 with sums.
        return max(0, 2 * (self.workers - 1) - 2) if self.collective and self.ring else 0

    @property
    def ring_s(self) -> float:
        """What everybody waits for processors in an exchange that goes round a ring, in seconds of the clock."""
        return self.ring_hop_s * self.more_hops  # lockstep's own loss, in `use`, has two of them

    @property
    def served_s(self) -> float:
        """What an exchange's messages take of a server's processor for each worker, in seconds."""
        return 0.0 if self.collective else 2 * self.message_s

    def carried_s(self, nbytes: float) -> float:
        """Returns what so many bytes take of a processor at either end, besides what their messages take."""
        # Among equals a rank's own share of every layer travels nowhere.
        return nbytes * self.byte_s * (1 - 1 / self.workers if self.collective else 1.0)


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
    return max(ends[-1] - ends[-2], _busy_s(layers, cluster, timeline.exchanges / STEPS))


def _busy_s(layers: Sequence[Layer], cluster: Cluster, exchanges: float) -> float:
    """What all processes compute in a step, over the cores that they share, and what all wait for: none is shorter."""
    if cluster.cores is None:
        return 0.0
    at_workers = sum(layer.forward_s + layer.backward_s + layer.encode_s + layer.decode_s for layer in layers)
    at_workers += exchanges * cluster.exchange_s
    carried_s = cluster.carried_s(sum(layer.push_nbytes + layer.pull_nbytes for layer in layers))
    at_workers += carried_s
    at_servers = sum(cluster.workers * layer.server_push_s + layer.server_update_s for layer in layers)
    at_servers += cluster.workers * (exchanges * cluster.served_s + carried_s)
    return (cluster.workers * at_workers + at_servers) / cluster.cores / cluster.use + exchanges * cluster.ring_s


class _Timeline:
    """When every resource is free again, in seconds from the beginning."""

    def __init__(self, layers: Sequence[Layer], cluster: Cluster) -> None:
        self._layers, self._cluster = layers, cluster
        # Workers that share too few cores take turns, and each of them then seems slower.
        self._crowded = 1.0 if cluster.cores is None else max(1.0, cluster.workers / cluster.cores)
        self._stretch = self._crowded
        self._alone_s = sum(each.forward_s + each.backward_s + each.encode_s + each.decode_s for each in layers)
        self._worker = self._up = self._down = 0.0
        self._in = [0.0] * cluster.shards
        self._processor = [0.0] * cluster.shards
        self._out = [0.0] * cluster.shards
        self._updated = [0.0] * len(layers)
        self._ahead = self._spread = 0.0  # the first worker, of the last: in this step, and by the pulls so far
        self._ready: list[list[int]] = [[] for _ in range(cluster.shards)]
        self.exchanges = 0

    def step(self) -> float:
        """Follows one step; returns when its backward pass is over."""
        self._ahead = self._spread
        # Those that had their updates first are done, or nearly so, when the last one begins: it shares with fewer.
        if self._alone_s:
            self._stretch = max(1.0, self._crowded - self._ahead / self._alone_s)
        overlap = self._cluster.overlap
        if not overlap or self._cluster.collective:
            self._worker = max(self._worker, *self._updated)
        for index, layer in enumerate(self._layers):
            self._worker = max(self._worker, self._updated[index])
            self._worker += self._stretch * (layer.decode_s + layer.forward_s)
        backward = range(len(self._layers) - 1, -1, -1)
        for index in backward:
            self._worker += self._stretch * (self._layers[index].backward_s + self._layers[index].encode_s)
            if overlap:
                self._encoded(index)
        if not overlap:
            for index in backward:
                self._encoded(index)
        for shard in range(self._cluster.shards):
            self._leave(shard)
        return self._worker

    def _encoded(self, index: int) -> None:
        """Takes a layer whose gradient is encoded; those of one shard leave together once they make a chunk."""
        shard = self._layers[index].shard
        self._ready[shard].append(index)
        if sum(self._layers[each].push_nbytes for each in self._ready[shard]) >= self._cluster.chunk_nbytes:
            self._leave(shard)

    def _leave(self, shard: int) -> None:
        """Exchanges what is ready for a shard, if anything."""
        ready, self._ready[shard] = self._ready[shard], []
        if not ready:
            return
        layers = [self._layers[index] for index in ready]
        self.exchanges += 1
        among_equals = self._cluster.collective
        carried_s = self._cluster.carried_s(sum(layer.push_nbytes + layer.pull_nbytes for layer in layers))
        own_s = self._cluster.exchange_s + (2 * carried_s if among_equals else carried_s)  # a rank is either end
        messages_s = 0.0 if self._cluster.cores is None else self._stretch * own_s
        if not among_equals:
            self._worker += messages_s
        chunk = Layer(
            name=layers[0].name,
            forward_s=0.0,
            backward_s=0.0,
            push_nbytes=sum(layer.push_nbytes for layer in layers),
            pull_nbytes=sum(layer.pull_nbytes for layer in layers),
            server_push_s=sum(layer.server_push_s for layer in layers)
            + (0.0 if among_equals else self._cluster.served_s + carried_s),
            server_update_s=sum(layer.server_update_s for layer in layers),
            shard=shard,
        )
        updated = self._exchange_among_equals(chunk, messages_s) if among_equals else self._exchange(chunk)
        for index in ready:
            self._updated[index] = updated

    def _exchange_among_equals(self, layer: Layer, messages_s: float) -> float:
        """As `_exchange`, where every worker holds a share: it sends and takes what the others hold or sent of it.

        All wait for the one that holds most. Processors deal with a part of a message, and add it, while the link
        carries the next: the slower of the two counts.
        """
        link, others = self._cluster.worker_link, self._cluster.workers - 1
        share = self._cluster.largest_share or 1 / self._cluster.workers
        # One way go its share to or from all others, and the other way what they hold.
        crossing = max(others * share, 1 - share)
        begins = max(self._worker, self._up, self._down)
        pushed = begins + crossing * layer.push_nbytes / link.bytes_per_s
        # Its own share of every other worker's gradient comes in meanwhile, and is added as it comes.
        arrived = pushed + 2 * link.latency_s * (1 + self._cluster.more_hops)
        added = max(arrived, self._processor[0]) + others * share * layer.server_push_s
        self._processor[0] = added + share * layer.server_update_s
        pulled = self._processor[0] + crossing * layer.pull_nbytes / link.bytes_per_s
        added_s = others * share * layer.server_push_s + share * layer.server_update_s
        self._up = self._down = max(pulled, begins + messages_s + added_s)
        return self._up + 2 * link.latency_s

    def _exchange(self, layer: Layer) -> float:
        """Sends gradients of all workers, updates, and sends the update to all; returns when they have it."""
        cluster = self._cluster
        shard, worker, server = layer.shard, cluster.worker_link, cluster.server_link
        begins = max(self._worker, self._up)
        self._up = begins + layer.push_nbytes / worker.bytes_per_s
        # The bytes of all workers flow through both links at once; the slower of the two says when the last is in.
        first = max(self._in[shard], begins - self._ahead)
        self._in[shard] = max(
            first + cluster.workers * layer.push_nbytes / server.bytes_per_s,
            begins + layer.push_nbytes / server.bytes_per_s,
        )
        arrived = max(self._up, self._in[shard]) + worker.latency_s + server.latency_s
        # Gradients are added as they come: the server is behind by one of them when the last is in.
        busy = cluster.workers * layer.server_push_s
        free = max(self._processor[shard], begins) + busy
        self._processor[shard] = max(free, arrived + layer.server_push_s) + layer.server_update_s
        begins = max(self._processor[shard], self._out[shard])
        self._out[shard] = begins + cluster.workers * layer.pull_nbytes / server.bytes_per_s
        self._spread = (cluster.workers - 1) * layer.pull_nbytes / server.bytes_per_s
        self._down = max(self._down, begins) + layer.pull_nbytes / worker.bytes_per_s
        return max(self._out[shard], self._down) + worker.latency_s + server.latency_s
