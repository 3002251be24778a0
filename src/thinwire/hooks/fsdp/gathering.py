"""Gathers parameters as frames: every rank sends its shards coded, and all ranks compute with the same decoded values.

Errors do not accumulate: the owner of a shard keeps and updates the exact values, and codes them for each forward pass.
The backward pass gathers the same parameters again; it decodes the frames of the forward pass, which are kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from thinwire.codecs import Codec, decode_all
from thinwire.collective.exchange import abort_packet
from thinwire.errors import ConfigError, FrameError, NonFiniteError, ProtocolError, ThinwireError
from thinwire.hooks.fsdp.parameter_groups import AllGather, ParameterGroup
from thinwire.hooks.fsdp.passes import Passes
from thinwire.packets import HEAD_NBYTES, LENGTH_NBYTES, parse, segments
from thinwire.policies.compression import PLAIN
from thinwire.schema import Abort
from thinwire.schema import Shard as ShardMessage
from thinwire.telemetry import Counters
from thinwire.transports.peers import PeerGroup, ReceiveBuffer

_TAG = 1 << 29
"""The first parameter group's tag: above those of gradients, below those of `runtime.peers`."""
_FRAME_SLACK = 1024


class CodedAllGather(AllGather):
    """Gathers a parameter group's shards as frames, in place of an all-gather.

    Args:
        group: the parameter group.
        number: of the group, the same on all ranks.
        codecs: of the coded parameters, by name; the others are sent uncoded.
        peers: the connections to the other ranks.
        counters: of bytes and seconds.
        passes: distinguish steps from evaluations.
    """

    def __init__(
        self,
        group: ParameterGroup,
        number: int,
        codecs: Mapping[str, Codec],
        peers: PeerGroup,
        counters: Counters,
        passes: Passes,
    ) -> None:
        self._passes = passes
        self._codecs = [codecs.get(name, PLAIN) for name in group.gathered_names]
        self._group = group
        self._number = number
        self._peers = peers
        self._counters = counters
        self._uncompressed = group.default_all_gather()
        self._kept: list[Sequence[bytes | memoryview]] = []
        self._buffers: dict[int, ReceiveBuffer] = {}

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        # Parameters of several dtypes come as bytes. A group of fewer ranks, to which parameters were resharded after
        # the forward pass, gathers values that were coded already.
        if not input_tensor.dtype.is_floating_point or group.size() != self._peers.size:
            return self._uncompressed(output_tensor, input_tensor, group, async_op)
        if not (self._kept and torch._C._current_graph_task_id() != -1):
            self._kept = self._exchange(input_tensor)
        begin = time.perf_counter()
        shards = output_tensor.view(self._peers.size, -1)
        for rank, (frames, shard) in enumerate(zip(self._kept, shards, strict=True)):
            self._fill(rank, frames, self._group.gathered(shard))
        self._count("gather_uncompressed_bytes", (self._peers.size - 1) * input_tensor.nbytes)
        self._count("decode_seconds", time.perf_counter() - begin)
        return None

    def _count(self, name: str, value: float) -> None:
        """Adds to a sum of the steps, or of evaluations, which are counted separately."""
        of_step = self._passes.takes_gradients or torch._C._current_graph_task_id() != -1
        self._counters.add(name if of_step else f"evaluation_{name}", value)

    def _fill(self, rank: int, frames: Sequence[bytes | memoryview], parts: Sequence[torch.Tensor]) -> None:
        """Decodes a rank's frames into its shards. Raises ProtocolError if one is of another size, or damaged.

        On a GPU a few launches decode all frames of a rank.
        """
        try:
            decode_all(frames, parts)
        except (ConfigError, FrameError) as error:
            name = self._peers.names[rank]
            raise ProtocolError(f"rank {name} sent parameters of {self._group} that cannot be read: {error}") from error

    def _exchange(self, shard: torch.Tensor) -> list[Sequence[bytes | memoryview]]:
        """Sends this rank's frames to all other ranks; returns every rank's, in rank order."""
        peers, begin = self._peers, time.perf_counter()
        frames, packet = list[bytes](), bytearray()
        failure: ThinwireError | None = None
        try:
            parts = zip(self._codecs, self._group.gathered(shard), self._group.gathered_names, strict=True)
            frames = [codec.encode(part, name=name) for codec, part, name in parts]
            packet = bytearray().join(segments(ShardMessage(step=0, bucket=self._number), frames))
        except NonFiniteError as error:  # the other ranks wait for these parameters
            failure, packet = error, abort_packet(error)
        encoded = time.perf_counter()
        most = HEAD_NBYTES + max(4, shard.itemsize) * shard.numel()
        most += (_FRAME_SLACK + LENGTH_NBYTES) * (len(self._codecs) + 1)
        receives = []
        for peer in peers.peers:
            buffer = self._buffers.setdefault(peer, ReceiveBuffer(most))
            receives.append(peers.receive(peer, buffer, _TAG + self._number))
        sends = [peers.send(peer, bytearray(packet), _TAG + self._number) for peer in peers.peers]
        self._count("wire_bytes", len(packet) * len(sends))
        found: list[Sequence[bytes | memoryview]] = [frames] * peers.size
        for transfer in receives:
            received = peers.wait(transfer)
            try:
                found[transfer.peer] = self._read(transfer.peer, received)
            except ThinwireError as error:  # raised after all receives, which the next gather would match otherwise
                failure = failure or error
        for transfer in sends:
            peers.wait(transfer)
        if failure is not None:
            raise failure
        self._count("encode_seconds", encoded - begin)
        self._count("wait_seconds", time.perf_counter() - encoded)
        return found

    def _read(self, peer: int, packet: memoryview) -> list[bytes]:
        message, frames = parse(packet, exact=False)
        if isinstance(message, Abort):
            raise NonFiniteError(f"rank {self._peers.names[peer]} gave up: {message.reason}")
        if not isinstance(message, ShardMessage) or message.bucket != self._number or len(frames) != len(self._codecs):
            raise ProtocolError(
                f"rank {self._peers.names[peer]} sent {type(message).__name__} with {len(frames)} frames; "
                f"{len(self._codecs)} frames of {self._group} were expected"
            )
        return [bytes(frame) for frame in frames if isinstance(frame, (bytes, memoryview))]
