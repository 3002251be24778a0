"""Drives a collective core with threads, a peer group, a GPU stream and deadlines.

Two threads each take bucket groups in order. The pushing thread encodes a group's shards and sends them to their
owners; the pulling thread adds the packets for this rank's shard, sends the average, and completes the buckets with
the other ranks' averages. The next group is encoded and sent while this one waits for its answers. Every wait ends at
the peer group's timeout.

The first failure stops everything: the rank sends each peer the reason, completes futures with NaN, and `wait_step`
raises.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thinwire.collective.core import Bucket, Collective
from thinwire.collective.exchange import Exchange, Group, Pass, Send, abort_packet
from thinwire.errors import ConfigError, DeadlineError, NonFiniteError, TransportError
from thinwire.packets import nbytes_of
from thinwire.runtime.bucket_buffers import BucketBuffer, Future, UnderWay
from thinwire.runtime.peers import FAREWELL, leave
from thinwire.telemetry import Counters
from thinwire.transports.peers import PeerGroup, ReceiveBuffer, Transfer

PATIENCE_S = 30.0
"""After a wait of this length the log names the peer that is late; no other message comes before the timeout."""
_CLOSE_S = 2.0
_log = logging.getLogger(__name__)


class CollectiveDriver:
    """The threads of one rank; they start with the first group and end with `close`, or with the process.

    Args:
        core: this rank's part in the exchange.
        peers: the connections to the other ranks.

    Attributes:
        failure: the error that ended the training; None during training.
        peers: the connections to the other ranks.
        completed: the time when the last step was complete, in seconds of `time.perf_counter`; 0 before the first.
    """

    def __init__(self, core: Collective, peers: PeerGroup) -> None:
        self.failure: Exception | None = None
        self._core = core
        self.peers = peers
        self.completed = 0.0
        self._counters = {way: Counters() for way in Pass}  # one for each thread
        self._peers_informed = threading.Event()
        self._left = self._closed = False
        self._reasons: list[Transfer] = []  # kept until they are read
        self._waiting: list[BucketBuffer] = []
        self._to_push: queue.SimpleQueue[UnderWay | None] = queue.SimpleQueue()
        self._to_pull: queue.SimpleQueue[UnderWay | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._awaited: tuple[float, int, int] | None = None  # since when, which peer, for which step
        self._last: threading.Event | None = None  # of the newest job; keeping the job would keep its gradients
        self._streams: dict[torch.device, Any] = {}
        self._buffers: WeakKeyDictionary[Group, dict[tuple[int, Pass], ReceiveBuffer]] = WeakKeyDictionary()

    def counters(self) -> dict[str, float]:
        """Returns the sums so far: bytes, values and messages sent, and seconds by purpose."""
        push, pull = (self._counters[way].snapshot() for way in Pass)
        return {key: push.get(key, 0) + pull.get(key, 0) for key in sorted({*push, *pull})}

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for messages, so far."""
        return self._counters[Pass.PULL]["wait_seconds"]

    def release_buffers(self) -> None:
        """Releases the memory of received messages: between two steps, when the next messages are much smaller."""
        self._buffers.clear()

    def spent(self) -> tuple[float, float]:
        """Returns seconds of encoding, decoding and copying, and bytes sent, so far."""
        push, pull = self._counters[Pass.PUSH], self._counters[Pass.PULL]
        copied_s = push["copy_seconds"] + pull["copy_seconds"]
        return push["encode_seconds"] + pull["decode_seconds"] + copied_s, push["wire_bytes"] + pull["wire_bytes"]

    def bucket_ready(self, bucket: Bucket, buffer: torch.Tensor, step: int, index: int, *, last: bool) -> Future:
        """Accepts a bucket of gradients that are ready on the current stream, and returns at once.

        Args:
            bucket: describes the tensors in the buffer.
            buffer: float16, bfloat16, float32 or float64, on any device.
            step: of the training.
            index: the bucket's number in the step.
            last: whether it ends the step.

        Returns:
            A future that completes with `buffer`, filled with the averaged gradients.

        Raises:
            ConfigError: the driver was closed, or the step is being captured in a CUDA graph.
        """
        self.check_open()
        if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                "gradients are exchanged by the host, and a CUDA graph captures nothing of that: leave backward() out "
                "of what is captured"
            )
        if index == 0:
            self._waiting.clear()
            self.settle()
        event, devices = None, list[int | str | torch.device]()
        if buffer.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # The buffer's device need not be the current one.
            event.record(torch.cuda.current_stream(buffer.device))
            devices = [buffer.device]
        future: Future = torch.futures.Future(devices=devices)
        waiting = BucketBuffer(buffer, event, future)
        if self.peers.size == 1:
            self._complete_alone(bucket, waiting, index, last=last)
            return future
        self._waiting.append(waiting)
        for exchange, count in self._core.bucket_ready(bucket, step, index, last=last):
            job = UnderWay(exchange, self._waiting[:count])
            del self._waiting[:count]
            self._submit(job)
        return future

    def flush(self, bucket: Bucket, buffer: torch.Tensor, waiting: set[str]) -> None:
        """Adds the residuals to a bucket's gradient, on the current stream; see `Collective.flush`.

        The sum is rounded to the gradient's dtype; for float16 and bfloat16 the rounding error is lost.
        """
        held = BucketBuffer(buffer, None, torch.futures.Future())
        values = held.values()
        self._core.flush(bucket, values, waiting)
        held.fill(values, keeps_inf=True)

    def settle(self) -> None:
        """Waits for the exchanges of an interrupted step: they still change residuals."""
        if self._last is not None:
            self._last.wait()

    def wait_step(self) -> None:
        """Waits for all exchanges of the step. Raises the error that made one fail."""
        self.settle()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises the error that ended the training, if any, once the peers have received it: the process may end."""
        if self.failure is not None:
            self._peers_informed.wait(2 * FAREWELL.total_seconds())
            raise self.failure

    def check_open(self) -> None:
        """Raises ConfigError if the driver was closed."""
        if self._closed:
            raise ConfigError("close() was called on this state: wrap the model, and call compress, anew")

    def give_up(self, error: BaseException) -> None:
        """Sends the peers the reason why this rank leaves, in place of its next packet, unless they have a failure."""
        if self._last is not None:
            self._last.wait(FAREWELL.total_seconds())
        if self.failure is None and not self._closed:
            self.failure = TransportError(f"this rank has left: {type(error).__name__}: {error}")
            self._tell(abort_packet(error), Pass.PUSH.value)  # the tag of a step's first packet

    def close_with(self, model: object) -> None:
        """Calls `close` when the model that this driver serves is garbage-collected."""
        weakref.finalize(model, self.close).atexit = False

    def close(self) -> None:
        """Ends the threads, once. Exchanges that are still under way get a moment to complete."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._to_push.put(None)  # the pushing thread passes it on, after its remaining jobs
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection may run on any thread
                thread.join(_CLOSE_S)
        self._threads.clear()

    def _complete_alone(self, bucket: Bucket, buffer: BucketBuffer, index: int, *, last: bool) -> None:
        """Completes a bucket where there is one rank: at once, with the failures of an exchange."""
        values, finite = buffer.values(), False
        try:
            finite = self.failure is None and self._core.complete_alone(bucket, values, index, last=last)
        except NonFiniteError as error:
            self.failure = error
            self._peers_informed.set()
        if finite:
            buffer.fill(values)
        else:
            buffer.buffer.fill_(torch.nan)
        buffer.future.set_result(buffer.buffer)

    def _submit(self, job: UnderWay) -> None:
        if not self._threads:
            for way, inbox, work in ((Pass.PUSH, self._to_push, self._push), (Pass.PULL, self._to_pull, self._pull)):
                name = f"thinwire-{way.name.lower()}"
                thread = threading.Thread(target=self._run, args=(way, inbox, work), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
            # A thread that the interpreter kills inside gloo takes the whole process down with an abort.
            atexit.register(self.close)
        self._last = job.done
        self._to_push.put(job)

    # ---- the threads

    def _run(self, way: Pass, inbox: queue.SimpleQueue[UnderWay | None], work: Callable[[UnderWay], None]) -> None:
        pushing, stopped = way is Pass.PUSH, False
        while (job := self._next(inbox)) is not None:
            # When the pushing thread fails, earlier groups are still completed: peers wait for them.
            stopped = stopped or job.failed or (pushing and self.failure is not None)
            if not stopped:
                try:
                    with self._own_stream(job.buckets[0].buffer.device):
                        work(job)
                except Exception as error:  # the training loop must see every error
                    stopped = True
                    self._fail(job, error, way)
            job.failed = stopped
            if pushing:
                self._to_pull.put(job)
            else:
                self._complete(job)
            del job  # it holds a step's gradients
        if pushing:
            self._to_pull.put(None)

    def _next(self, inbox: queue.SimpleQueue[UnderWay | None]) -> UnderWay | None:
        """Returns a thread's next job; meanwhile logs a peer for which the other thread has waited long."""
        logged: object = None
        while True:
            try:
                return inbox.get(timeout=PATIENCE_S / 2)
            except queue.Empty:
                awaited = self._awaited
            if awaited is not None and awaited is not logged and time.monotonic() - awaited[0] >= PATIENCE_S:
                logged, (since, peer, step), names = awaited, awaited, self.peers.names
                _log.warning(
                    "rank %s has kept rank %s waiting for %.0f s in step %s; after %g s the training ends",
                    *(names[peer], names[self.peers.rank], time.monotonic() - since, step),
                    self.peers.timeout.total_seconds(),
                )

    @contextmanager
    def _own_stream(self, device: torch.device) -> Iterator[None]:
        """Uses the threads' own GPU stream: on DDP's stream their work would queue behind the backward pass."""
        if device.type != "cuda":
            yield
            return
        # A thread begins on GPU 0. Without this it would return to a stream of GPU 0 after every job, and the process
        # would hold a second context, some 500 MiB, on another rank's GPU.
        torch.cuda.set_device(device)
        stream = self._streams.get(device)
        if stream is None:  # both threads come here, and use the first one's stream
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()  # code that waits for the job need not know of this stream

    def _push(self, job: UnderWay) -> None:
        begin = time.perf_counter()
        exchange, counters = job.exchange, self._counters[Pass.PUSH]
        job.values = [bucket.values() for bucket in job.buckets]
        self._core.started(exchange)  # copies, so it follows the wait for the buckets' streams in `values`
        for (peer, way), buffer in self._receive_buffers(exchange).items():
            job.receives.setdefault(way, []).append(self.peers.receive(peer, buffer, job.tag(way)))
        copied = time.perf_counter()
        sends = exchange.push(job.values)
        encoded = time.perf_counter()
        self._send(job, sends, counters)
        counters.add("copy_seconds", copied - begin)
        counters.add("encode_seconds", encoded - copied)

    def _pull(self, job: UnderWay) -> None:
        exchange, counters = job.exchange, self._counters[Pass.PULL]
        begin = time.perf_counter()
        waited = self._receive(job, Pass.PUSH, counters)
        if exchange.pulls:
            self._send(job, exchange.pull(), counters)
            waited += self._receive(job, Pass.PULL, counters)
        decoded = time.perf_counter()
        for bucket, values in zip(job.buckets, job.values, strict=True):
            if exchange.skipped:
                bucket.buffer.fill_(torch.nan)
            else:
                bucket.fill(values)
        self._core.finished(exchange)
        counters.add("copy_seconds", time.perf_counter() - decoded)
        counters.add("wait_seconds", waited)
        counters.add("decode_seconds", decoded - begin - waited)
        counters.add("payload_bytes_received", exchange.received_nbytes)
        if exchange.last:
            counters.add("steps", 1)

    def _receive(self, job: UnderWay, way: Pass, counters: Counters) -> float:
        """Gives the exchange every peer's packet of a pass; returns the seconds spent waiting."""
        waited = 0.0
        for transfer in job.receives[way]:
            begin = time.perf_counter()
            self._awaited = time.monotonic(), transfer.peer, job.exchange.step
            try:
                packet = self.peers.wait(transfer)
            finally:
                self._awaited = None
            waited += time.perf_counter() - begin
            counters.add("wire_bytes_received", nbytes_of(packet))
            job.exchange.receive(transfer.peer, way, packet)
        return waited

    def _send(self, job: UnderWay, sends: Sequence[Send], counters: Counters) -> None:
        for send in sends:
            job.sends.append(self.peers.send(send.peer, send.packet, job.tag(send.way)))
            counters.add("wire_bytes", len(send.packet))
            counters.add("messages", 1)
            counters.add("payload_bytes", send.payload_nbytes)
            counters.add("values", send.num_values)
            counters.add("frames", send.num_frames)

    def _complete(self, job: UnderWay) -> None:
        try:
            if job.failed:
                for bucket in job.buckets:
                    bucket.buffer.fill_(torch.nan)
        except Exception as error:  # a tensor that cannot be written: the future must complete nevertheless
            self.failure = self.failure or error
        if job.exchange.last:
            self.completed = time.perf_counter()
        job.done.set()
        for bucket in job.buckets:
            bucket.future.set_result(bucket.buffer)
        for transfer in [] if job.failed else job.sends:
            with suppress(TransportError):  # the next group's receive reports a peer that is gone
                self.peers.wait(transfer)

    def _receive_buffers(self, exchange: Exchange) -> dict[tuple[int, Pass], ReceiveBuffer]:
        """Returns a buffer for each peer and pass; every step uses the same ones."""
        group = exchange.group
        found = self._buffers.get(group)
        if found is None:
            own = group.max_packet_nbytes(group.rank)
            found = self._buffers[group] = {
                (peer, way): ReceiveBuffer(own if way is Pass.PUSH else group.max_packet_nbytes(peer))
                for peer in group.peers
                for way in (Pass if exchange.pulls else (Pass.PUSH,))
            }
        return found

    # ---- failures

    def _fail(self, job: UnderWay, error: Exception, way: Pass) -> None:
        """Keeps the first failure, and sends the peers the reason.

        After a timeout it sends none: gloo closes every connection of a group when one wait times out.
        """
        self.failure = self.failure or error
        try:
            if not isinstance(error, DeadlineError):
                self._tell(abort_packet(error), job.tag(way))
        finally:
            self._peers_informed.set()

    def _tell(self, packet: bytearray, tag: int) -> None:
        """Sends every peer the reason, each by itself, and stays until all have left: one that has left needs none."""
        for peer in self.peers.peers:
            with suppress(TransportError):
                self._reasons.append(self.peers.send(peer, packet, tag))
        if not self._left:
            self._left = True
            leave(self.peers, FAREWELL)
