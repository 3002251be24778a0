"""The model of a synchronous step: from sizes, rates and seconds of computation to seconds of a step.

All workers are equal, so the model follows the last of them through its step, layer by layer. The other workers keep
the servers' links and processors busy, which serve one worker after the other. Each resource (a worker's processor, its
link up and down, a server's link in and out, a server's processor) serves in order, one thing at a time. A layer's
gradient leaves when the backward pass has produced it, unless the design sends all at the end; the next forward pass
waits for the layer's update (wait-free back-propagation; Wu 2018, §2.3.2, figure 2.4).

In the collective mode every worker serves its own share of every layer: its link and processor carry both parts, and
the next forward pass begins when all updates are in, as in DDP and FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.planner.transport_costs import SHARED_USE

STEPS = 8
"""Steps that are followed: the pipeline fills within three, and the last one's length is the answer."""


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """One tensor at each exchange: bytes on the wire, and seconds of a processor.

    Args:
        push_nbytes: from a worker to the server.
        pull_nbytes: from the server to a worker.
        encode_s: of the push, at the worker.
        decode_s: of the pull, at the worker, applied.
        server_push_s: of the server for one worker's push: decode and add.
        server_update_s: of the server once an exchange: update, and encode the answer.
    """

    push_nbytes: float
    pull_nbytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0
    server_push_s: float = 0.0
    server_update_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Layer(TensorCosts):
    """One layer, one tensor, or a part of it: its values are computed and sent together.

    Args:
        forward_s: of one worker's forward pass, in seconds of a processor.
        backward_s: of its backward pass.
        shard: the server that holds it.
    """

    forward_s: float
    backward_s: float
    shard: int = 0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers and servers, and the links between them.

    Args:
        workers: how many, all alike.
        bytes_per_s: of every process's link, each way.
        latency_s: from the last byte sent to the message in the other program's hands.
        shards: how many servers; 1 in the collective mode.
        cores: processors that all processes share; None: each process has its own.
        overlap: gradients leave during the backward pass; else all leave at its end, and the next forward pass waits
            for all updates.
        collective: the workers are the servers, each of a share of every layer.
        ring: in the collective mode, messages go round a ring, as in an all-reduce; else to all ranks and back.
        chunk_nbytes: gradients leave when so many bytes are ready for a server; 0: layer by layer.
        message_s: of a server's processor for a message that comes or leaves; 0 in the collective mode.
        worker_message_s: of a worker's processor likewise; counted where cores are shared, else hidden in threads.
        byte_s: of a processor for each byte at either end; counted at a worker where cores are shared. 0 in the
            collective mode.
        hop_s: wait at each further hop of a ring, where cores are shared.
        largest_share: in the collective mode, the share of every layer on the rank that owns most; None: 1/workers.
    """

    workers: int
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    shards: int = 1
    cores: int | None = None
    overlap: bool = True
    collective: bool = False
    ring: bool = False
    chunk_nbytes: float = 0.0
    message_s: float = 0.0
    worker_message_s: float = 0.0
    byte_s: float = 0.0
    hop_s: float = 0.0
    largest_share: float | None = None

    @property
    def crowded(self) -> float:
        """How many times as long as alone a worker computes that takes turns with the others."""
        return 1.0 if self.cores is None else max(1.0, self.workers / self.cores)

    @property
    def exchange_s(self) -> float:
        """Seconds of a worker's processor for the messages of an exchange."""
        # Collective: one to and one from every other rank, and the same for the sums.
        return self.worker_message_s * (4 * (self.workers - 1) if self.collective else 2)

    @property
    def more_hops(self) -> int:
        """Hops of a ring beyond the two of an exchange with all ranks: N − 1 with parts and N − 1 with sums."""
        return max(0, 2 * (self.workers - 1) - 2) if self.collective and self.ring else 0

    @property
    def served_s(self) -> float:
        """Seconds of a server's processor for one worker's messages of an exchange."""
        return 0.0 if self.collective else 2 * self.message_s


def step_s(layers: Sequence[Layer], cluster: Cluster) -> float:
    """Returns the seconds of one step, with all pipelines full.

    Args:
        layers: one or more, from the input to the output.
        cluster: where they are trained.

    Example:
        Three layers as in Wu's figure 2.4: 11 units of time with overlap, and 13 without it, where updates come back
        while other gradients still leave.

        >>> layers = [Layer(forward_s=1, backward_s=2, push_nbytes=1, pull_nbytes=1) for _ in range(3)]
        >>> [step_s(layers, Cluster(workers=1, bytes_per_s=1.0, overlap=overlap)) for overlap in (True, False)]
        [11.0, 13.0]
    """
    timeline = _Timeline(layers, cluster)
    ends = [timeline.step() for _ in range(STEPS)]
    return max(ends[-1] - ends[-2], _busy_s(layers, cluster, timeline.exchanges / STEPS))


def _busy_s(layers: Sequence[Layer], cluster: Cluster, exchanges: float) -> float:
    """Returns the seconds in which shared cores compute a step of all processes, and their waits in a ring."""
    if cluster.cores is None:
        return 0.0
    carried_s = cluster.byte_s * (_sum(layers, "push_nbytes") + _sum(layers, "pull_nbytes"))
    at_worker = sum(_alone_s(layer) for layer in layers) + exchanges * cluster.exchange_s + carried_s
    at_server = _sum(layers, "server_push_s") + exchanges * cluster.served_s + carried_s
    whole = cluster.workers * (at_worker + at_server) + _sum(layers, "server_update_s")
    return whole / cluster.cores / SHARED_USE + exchanges * cluster.hop_s * cluster.more_hops


def _alone_s(layer: Layer) -> float:
    return layer.forward_s + layer.backward_s + layer.encode_s + layer.decode_s


def _sum(layers: Sequence[Layer], name: str) -> float:
    return float(sum(getattr(layer, name) for layer in layers))


class _Timeline:
    """When every resource is free again, in seconds from the beginning."""

    def __init__(self, layers: Sequence[Layer], cluster: Cluster) -> None:
        self._layers, self._cluster = layers, cluster
        self._stretch = cluster.crowded
        self._alone_s = sum(map(_alone_s, layers))
        self._worker = self._up = self._down = 0.0
        self._in, self._processor, self._out = ([0.0] * cluster.shards for _ in range(3))
        self._updated = [0.0] * len(layers)
        self._ahead = self._spread = 0.0  # the first worker, of the last: in this step, and by the pulls so far
        self._ready: list[list[int]] = [[] for _ in range(cluster.shards)]
        self.exchanges = 0

    def step(self) -> float:
        """Follows one step; returns when its backward pass is over."""
        self._ahead = self._spread
        # Workers that had their updates first are nearly done when the last one begins: it shares with fewer.
        if self._alone_s:
            self._stretch = max(1.0, self._cluster.crowded - self._ahead / self._alone_s)
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
        """Collects encoded gradients by shard, and sends a shard's when they fill a chunk."""
        ready = self._ready[self._layers[index].shard]
        ready.append(index)
        if sum(self._layers[each].push_nbytes for each in ready) >= self._cluster.chunk_nbytes:
            self._leave(self._layers[index].shard)

    def _leave(self, shard: int) -> None:
        """Exchanges the gradients that are ready for a shard."""
        ready, self._ready[shard] = self._ready[shard], []
        if not ready:
            return
        layers, cluster = [self._layers[index] for index in ready], self._cluster
        self.exchanges += 1
        names = ("push_nbytes", "pull_nbytes", "server_push_s", "server_update_s")
        push, pull, add_s, update_s = (_sum(layers, name) for name in names)
        carried_s = cluster.byte_s * (push + pull)
        messages_s = 0.0 if cluster.cores is None else self._stretch * (cluster.exchange_s + carried_s)
        if cluster.collective:
            updated = self._exchange_among_ranks(push, pull, add_s, update_s, messages_s)
        else:
            self._worker += messages_s
            updated = self._exchange(shard, push, pull, add_s + cluster.served_s + carried_s, update_s)
        for index in ready:
            self._updated[index] = updated

    def _exchange_among_ranks(
        self, push: float, pull: float, add_s: float, update_s: float, messages_s: float
    ) -> float:
        """Exchanges among ranks, which all wait for the rank that owns most.

        Processors deal with a part of a message, and add it, while the link carries the next: the slower one counts.
        """
        cluster, others = self._cluster, self._cluster.workers - 1
        share = cluster.largest_share or 1 / cluster.workers
        # Its link carries its own share to or from all other ranks one way, and their shares the other way.
        crossing = max(others * share, 1 - share)
        begins = max(self._worker, self._up, self._down)
        pushed = begins + crossing * push / cluster.bytes_per_s
        arrived = pushed + cluster.latency_s * (1 + cluster.more_hops)
        added_s = others * share * add_s
        self._processor[0] = max(arrived, self._processor[0]) + added_s + share * update_s
        pulled = self._processor[0] + crossing * pull / cluster.bytes_per_s
        self._up = self._down = max(pulled, begins + messages_s + added_s + share * update_s)
        return self._up + cluster.latency_s

    def _exchange(self, shard: int, push: float, pull: float, add_s: float, update_s: float) -> float:
        """Sends gradients of all workers, updates, and sends the update to all; returns when they have it."""
        workers, rate, latency_s = self._cluster.workers, self._cluster.bytes_per_s, self._cluster.latency_s
        begins = max(self._worker, self._up)
        self._up = begins + push / rate
        # The bytes of all workers cross the server's link; the last worker's cannot be in before it has sent them.
        first = max(self._in[shard], begins - self._ahead)
        self._in[shard] = max(first + workers * push / rate, self._up)
        arrived = self._in[shard] + latency_s
        # Gradients are added as they come: the server is behind by one of them when the last is in.
        free = max(self._processor[shard], begins) + workers * add_s
        self._processor[shard] = max(free, arrived + add_s) + update_s
        begins = max(self._processor[shard], self._out[shard])
        self._out[shard] = begins + workers * pull / rate
        self._spread = (workers - 1) * pull / rate
        self._down = max(self._down, begins) + pull / rate
        return max(self._out[shard], self._down) + latency_s
