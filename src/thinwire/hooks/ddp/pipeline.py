"""Keeps gradients moving while the backward pass goes on: two threads, each taking jobs in order.

A job is one bucket of DDP's, or several small ones that travel together. The pushing thread encodes a job's shares and
sends them to their owners; the pulling thread sums what comes for this rank's share, sends the average, and completes
the buckets with the averages of the others. So the next job is encoded and travels while this one waits for its
answers. Every wait ends at the peers' timeout.

The first failure stops everything: peers are told why, futures complete with NaN, and `wait_step` raises.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from thinwire.errors import ConfigError, FrameError, NonFiniteError, ProtocolError, ThinwireError, TransportError
from thinwire.hooks.ddp.exchange import Share
from thinwire.hooks.ddp.job import PULL, PUSH, Job, Use, by_bucket, fill, tag, values_of
from thinwire.hooks.ddp.mesh import Coming, Mesh
from thinwire.hooks.ddp.message import Message, Say, pack, read
from thinwire.hooks.ddp.residuals import Residuals
from thinwire.telemetry import Counters

_CLOSE_S = 2.0
_FAREWELL = timedelta(seconds=5)
"""How long a rank that gives up stays until all have heard why, those too that are still busy with something else."""


class Pipeline:
    """The two threads of one rank; they start with the first bucket and end with `close`, or with the process.

    Args:
        mesh: the way to the other ranks.
        residuals: this rank's contexts, touched by no one else between a step's first bucket and its end.
        mean: whether to average or to sum.
        skip: whether NaN or Inf on any rank makes all ranks skip the step; otherwise it ends the training.
    """

    def __init__(self, mesh: Mesh, residuals: Residuals, *, mean: bool, skip: bool) -> None:
        self.push_counters = Counters()
        self.pull_counters = Counters()
        self.steps_skipped = 0
        self.failure: Exception | None = None
        self._mesh = mesh
        self._residuals = residuals
        self._scale = 1 / mesh.size if mean else 1.0
        self._skip = skip
        self._void = False
        self._parted = False
        self._told = threading.Event()
        self._to_push: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._to_pull: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._last: Job | None = None
        self._stream: Any = None

    def submit(self, job: Job) -> None:
        """Takes a bucket; its future completes with the bucket's own tensor, filled with the average."""
        if not self._threads:
            for name, inbox, work in (("push", self._to_push, self._push), ("pull", self._to_pull, self._pull)):
                thread = threading.Thread(target=self._run, args=(inbox, work), name=f"thinwire-{name}", daemon=True)
                thread.start()
                self._threads.append(thread)
            # A thread that the interpreter kills inside gloo takes the whole process down with an abort.
            atexit.register(self.close)
        if job.last:
            self._last = job
        self._to_push.put(job)

    def wait_step(self) -> None:
        """Waits for the step's last bucket. Raises what made it fail."""
        if self._last is not None:
            self._last.done.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what ended the training, if something did, once the peers have been told: the process may end then."""
        if self.failure is not None:
            self._told.wait(2 * _FAREWELL.total_seconds())
            raise self.failure

    def close(self) -> None:
        """Ends the threads. Nothing may be under way; what is, gets a moment to finish."""
        atexit.unregister(self.close)
        for inbox in (self._to_push, self._to_pull):
            inbox.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._threads.clear()

    # ---- the threads

    def _run(self, inbox: queue.SimpleQueue[Job | None], work: Callable[[Job], None]) -> None:
        pushing, stopped = inbox is self._to_push, False
        while (job := inbox.get()) is not None:
            # When the pushing thread fails, the buckets before that one are still completed: peers count on it.
            stopped = stopped or job.failed or (pushing and self.failure is not None)
            if not stopped:
                try:
                    with self._beside(job):
                        work(job)
                except Exception as error:  # whatever it is, the training loop must hear of it
                    stopped = True
                    self._fail(job, error, PUSH if pushing else PULL)
            job.failed = stopped
            if pushing:
                self._to_pull.put(job)
            else:
                self._complete(job)

    @contextmanager
    def _beside(self, job: Job) -> Iterator[None]:
        """On a GPU, a stream of the threads' own: on DDP's, their work would queue behind the backward pass."""
        device = job.parts[0].buffer.device
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()  # so that whoever is told that a job is done need not know of this stream

    def _push(self, job: Job) -> None:
        begin = time.perf_counter()
        if job.bucket == 0 and self._skip:
            self._residuals.remember()
        for part in job.parts:
            part.values = values_of(part)
        for peer in self._mesh.peers:
            job.pushes.append(self._mesh.receive(peer, job.layout.incoming[peer, PUSH], tag(job, PUSH)))
            job.pulls.append(self._mesh.receive(peer, job.layout.incoming[peer, PULL], tag(job, PULL)))
        copied = time.perf_counter()
        frames: dict[int, list[bytes]] = {}
        try:
            for part in job.parts:
                part.shares[self._mesh.rank].begin(part.values)
            for peer in self._mesh.peers:
                frames[peer] = []
                for part in job.parts:
                    frames[peer] += part.shares[peer].encode(part.values)
                self._count(self.push_counters, job.layout.of(peer), len(frames[peer]), 1)
        except NonFiniteError as error:
            self._refuse(job, error)
        encoded = time.perf_counter()
        for peer in self._mesh.peers:
            data = pack(job.step, job.bucket, frames.get(peer, []), Say.VOID if job.void else Say.NOTHING)
            self._send(job, peer, data, PUSH, peer, self.push_counters)
        self.push_counters.add("copy_seconds", copied - begin)
        self.push_counters.add("encode_seconds", encoded - copied)

    def _pull(self, job: Job) -> None:
        own = self._mesh.rank
        waited = worked = 0.0
        for coming in job.pushes:
            began = time.perf_counter()
            message = self._read(job, coming, own)
            came = time.perf_counter()
            if not job.void:
                self._decode(job, coming, own, message.frames, Share.add)
            waited += came - began
            worked += time.perf_counter() - came
        began = time.perf_counter()
        frames: list[bytes] = []
        if not job.void:
            try:
                for part in job.parts:
                    frames += part.shares[own].finish(part.values, self._scale)
                self._count(self.pull_counters, job.layout.of(own), len(frames), len(self._mesh.peers))
            except NonFiniteError as error:
                self._refuse(job, error)
        data = pack(job.step, job.bucket, frames, Say.VOID if job.void else Say.NOTHING)
        for peer in self._mesh.peers:
            self._send(job, peer, data, PULL, own, self.pull_counters)
        if not job.void:
            by_bucket(job, own, frames, Share.apply)
        worked += time.perf_counter() - began
        for coming in job.pulls:
            began = time.perf_counter()
            message = self._read(job, coming, coming.peer)
            came = time.perf_counter()
            if not job.void:
                self._decode(job, coming, coming.peer, message.frames, Share.apply)
            waited += came - began
            worked += time.perf_counter() - came
        began = time.perf_counter()
        for part in job.parts:
            if job.void:
                part.buffer.fill_(torch.nan)
            else:
                fill(part.buffer, part.values)
        self._void = self._void or job.void
        if job.last and self._void:
            self._residuals.put_back()
            self.steps_skipped += 1
            self._void = False
        self.pull_counters.add("copy_seconds", time.perf_counter() - began)
        self.pull_counters.add("wait_seconds", waited)
        self.pull_counters.add("decode_seconds", worked)
        if job.last:
            self.pull_counters.add("steps", 1)

    def _complete(self, job: Job) -> None:
        if job.failed:
            for part in job.parts:
                part.buffer.fill_(torch.nan)
        job.done.set()
        for part in job.parts:
            part.future.set_result(part.buffer)
        if not job.failed:
            try:
                for peer, sending in job.sending:
                    self._mesh.sent(sending, peer)
            except ThinwireError as error:
                self.failure = self.failure or error
                self._told.set()

    # ---- parts of both

    def _refuse(self, job: Job, error: NonFiniteError) -> None:
        if not self._skip:
            raise error
        job.void = True

    def _read(self, job: Job, coming: Coming, owner: int) -> Message:
        peer = f"rank {coming.peer}"
        num_frames = sum(share.num_frames for share in job.layout.of(owner))
        message = read(self._mesh.wait(coming), job.step, job.bucket, num_frames, peer)
        if message.say is Say.ABORT:
            kind, _, text = message.text.partition(": ")
            raise (NonFiniteError if kind == NonFiniteError.__name__ else ProtocolError)(f"{peer} gave up: {text}")
        job.void = job.void or message.say is Say.VOID
        return message

    def _decode(self, job: Job, coming: Coming, owner: int, frames: list[memoryview], use: Use) -> None:
        try:
            by_bucket(job, owner, frames, use)
        except FrameError as error:
            raise ProtocolError(f"rank {coming.peer} sent a frame that cannot be read: {error}") from error

    def _send(self, job: Job, peer: int, data: bytearray, way: int, owner: int, counters: Counters) -> None:
        if len(data) > job.layout.max_nbytes(owner):
            numel = sum(share.numel for share in job.layout.of(owner))
            raise ConfigError(
                f"{len(data)} bytes for {numel} values are more than the values themselves; "
                "choose a codec that makes them smaller, or exclude these parameters"
            )
        job.sending.append((peer, self._mesh.send(peer, data, tag(job, way))))
        counters.add("wire_bytes", len(data))
        counters.add("messages", 1)

    def _count(self, counters: Counters, owned: list[Share], num_frames: int, copies: int) -> None:
        counters.add("payload_bytes", sum(share.payload_nbytes for share in owned) * copies)
        counters.add("values", sum(share.numel for share in owned) * copies)
        counters.add("frames", num_frames * copies)

    def _fail(self, job: Job, error: Exception, way: int) -> None:
        """Keeps the first failure and tells the peers, unless they are what failed."""
        self.failure = self.failure or error
        try:
            if not isinstance(error, TransportError):
                self._tell(job, error, way)
        finally:
            self._told.set()

    def _tell(self, job: Job, error: Exception, way: int) -> None:
        data = pack(job.step, job.bucket, [], Say.ABORT, f"{type(error).__name__}: {error}")
        try:
            farewells = [(peer, self._mesh.send(peer, data, tag(job, way))) for peer in self._mesh.peers]
            for peer, sending in farewells:
                self._mesh.sent(sending, peer, _FAREWELL)
        except TransportError:
            return  # whoever is gone needs no reason
        if not self._parted:
            self._parted = True
            self._mesh.part(_FAREWELL)
