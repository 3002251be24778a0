"""Runs a worker's procedures: when torch calls a hook of the model, on connections to the shards.

`ModelHooks` knows when torch calls, `WorkerDriver` how messages are sent and waited for; what is then sent and applied
is the worker's to decide. Messages are read by the thread that needs them, when it needs them. The transport's own
threads move bytes meanwhile, so nothing waits on this one; and the cores need no lock.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from thinwire.errors import ConfigError, DeadlineError, ProtocolError, SessionLostError, TransportError
from thinwire.packets import pack, parse
from thinwire.schema import Members
from thinwire.telemetry import Counters
from thinwire.transports.base import Connection
from thinwire.worker.conversation import Conversation
from thinwire.worker.core import Worker
from thinwire.worker.effects import Poll, Procedure, Receive, Send, T
from thinwire.worker.model import WorkerTensor

LOOK_S = 1.0
"""How long one shard is waited for before the connections to the others are looked at: a shard that was lost is noticed
wherever its workers are."""


class WorkerDriver:
    """One worker's connections to its shards.

    Args:
        conversations: the worker's, one for each shard.
        connections: to the shards' servers, in the same order; closed with the driver.
        timeout_s: how long the slowest worker of a step may keep the others waiting, in seconds.
        counters: for the seconds spent in procedures, and of those the seconds spent waiting.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        connections: Sequence[Connection],
        *,
        timeout_s: float = 600.0,
        counters: Counters | None = None,
    ) -> None:
        self._conversations, self._connections = conversations, connections
        self._timeout_s = timeout_s
        self._counters = counters or Counters()
        self._lost = False

    def run(self, procedure: Procedure[T]) -> T:
        """Carries out a procedure's effects one by one; returns what it returns.

        Raises:
            DeadlineError: no message came in time.
            ProtocolError: a shard refused this worker, or broke the conversation.
            TransportError: a connection is lost.
        """
        begin = time.perf_counter()
        try:
            while True:
                try:
                    effect = next(procedure)
                except StopIteration as end:
                    result: T = end.value
                    return result
                match effect:
                    case Send():
                        self._send(effect)
                    case Receive():
                        self._receive(effect)
                    case Poll():
                        self._receive_arrived(effect.shard)
        except SessionLostError:
            self._lost = True
            raise
        finally:
            self._counters.add("exchange_seconds", time.perf_counter() - begin)

    def close(self) -> None:
        """Leaves every shard in good order, where one was lost to come again. A session that broke is only dropped."""
        for conversation, connection in zip(self._conversations, self._connections, strict=True):
            try:
                self.run(conversation.leave(returning=self._lost))
                while connection.receive(self._timeout_s) is not None:
                    pass
            except (TransportError, ProtocolError):
                pass
            finally:
                connection.close()

    @property
    def wire_nbytes(self) -> tuple[int, int]:
        """Bytes sent and received so far, frames and messages included."""
        sent = sum(connection.bytes_sent for connection in self._connections)
        return sent, sum(connection.bytes_received for connection in self._connections)

    def _send(self, effect: Send) -> None:
        try:
            self._connections[effect.shard].send(pack(effect.message, effect.frames))
        except TransportError:
            # A server that ends a session says why: better raised than that nothing can be sent any more.
            with suppress(TransportError):
                self._receive_arrived(effect.shard)
            raise

    def _receive(self, effect: Receive) -> None:
        connection = self._connections[effect.shard]
        begin = time.perf_counter()
        try:
            while True:
                left = self._timeout_s - (time.perf_counter() - begin)
                try:
                    packet = connection.receive(min(left, LOOK_S) if len(self._connections) > 1 else left)
                    break
                except DeadlineError:
                    if left <= LOOK_S or len(self._connections) == 1:
                        raise
                for other in range(len(self._connections)):
                    if other != effect.shard:
                        self._receive_arrived(other)
        except DeadlineError:
            raise DeadlineError(
                f"{connection.address}: waited {self._timeout_s:g} s for {effect.awaited}. Another worker may be stuck "
                "or slow; `timeout_s` sets how long to wait"
            ) from None
        finally:
            self._counters.add("wait_seconds", time.perf_counter() - begin)
        if packet is None:
            raise TransportError(
                f"{connection.address}: the server ended the session while we waited for {effect.awaited}"
            )
        self._take(effect.shard, packet)

    def _receive_arrived(self, shard: int) -> None:
        """Takes every message that has arrived."""
        with suppress(DeadlineError):
            while (packet := self._connections[shard].receive(0)) is not None:
                self._take(shard, packet)

    def _take(self, shard: int, packet: bytes) -> None:
        conversation = self._conversations[shard]
        conversation.received(*parse(packet))
        for notice in conversation.notices:
            if shard == 0 and notice.reason:  # all shards say the same
                self._tell(notice)
        conversation.notices.clear()

    def _tell(self, notice: Members) -> None:
        here = len(notice.ranks)
        if notice.interrupted:
            state = "the others wait for it, for as long as the server says"
        elif here >= notice.least:
            state = f"the training goes on with {here} workers"
        else:
            state = f"{here} workers are here, and the training waits until they are {notice.least}"
        warnings.warn(f"{notice.reason}; {state}", UserWarning, stacklevel=2)


class ModelHooks:
    """Hooks on one model, from the moment this is made until `remove`.

    A layer's update is applied before its forward pass; a gradient is pushed when the backward pass has produced it.

    Args:
        model: whose parameters and buffers the worker's tensors are.
        worker: whose procedures the hooks run.
        driver: runs them.
    """

    def __init__(self, model: nn.Module, worker: Worker, driver: WorkerDriver) -> None:
        self._worker, self._driver = worker, driver
        self._is_copy = False
        # Of a model that is compiled, torch would trace layers' hooks, and what they call, into the graph.
        disable: Any = torch.compiler.disable  # untyped in torch
        self._pull = disable(self._pull_now)
        self._tensors = worker.model.tensors
        self._reached: set[int] = set()
        self._unreached: list[int] | None = None
        self._handles: list[Any] = []
        index = {id(tensor.parameter): number for number, tensor in enumerate(self._tensors)}
        # Where the model has its parameters: a dict of modules' parameters, and the name in it.
        self._owners = [
            (module._parameters, name, self._tensors[index[id(parameter)]])
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in index
        ]
        self._frozen = [(name, weakref.ref(p)) for name, p in model.named_parameters() if id(p) not in index]
        for module in model.modules():
            own = [index[id(parameter)] for parameter in module._parameters.values() if id(parameter) in index]
            if module is model:
                self._handles.append(model.register_forward_pre_hook(partial(self._before_model, own)))
            elif own := own + [index[id(buffer)] for buffer in module._buffers.values() if id(buffer) in index]:
                self._handles.append(module.register_forward_pre_hook(partial(self._before_layer, own)))
        for tensor in self._tensors:
            if tensor.parameter.requires_grad:
                register: Any = tensor.parameter.register_post_accumulate_grad_hook  # untyped in torch
                self._handles.append(register(partial(self._after_gradient, tensor)))

    def remove(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()

    def check_places(self) -> None:
        """Looks whether the model's parameters are still those that the worker exchanges.

        Raises:
            ConfigError: one has other memory, or another has taken its place: updates would not reach the model.
        """
        for owner, key, tensor in self._owners:
            parameter, now = tensor.parameter, owner.get(key)
            if now is not None and now is not parameter:
                raise ConfigError(
                    f"the model has another parameter in place of {tensor.name!r} than when it was given to "
                    "tw.distribute, and neither the optimizer nor the other workers know it. Load weights by "
                    "load_state_dict without assign=True, and change layers before the optimizer is made"
                )
            if parameter.data_ptr() != tensor.shown.data_ptr():
                raise ConfigError(
                    f"{tensor.name!r} was moved after tw.distribute: it is {_place(parameter)} in other memory than "
                    f"the {_place(tensor.shown)} that is exchanged. Call .to(), .half() and the like before "
                    "tw.distribute, and change values in place, as in parameter.data.copy_(values)"
                )
        self._warn_of_unfrozen()

    def _warn_of_unfrozen(self) -> None:
        parameters = ((name, ref()) for name, ref in self._frozen)
        found = [name for name, p in parameters if p is not None and p.requires_grad and p.grad is not None]
        if found:
            self._frozen = []
            names = ", ".join(found[:4]) + (", …" if len(found) > 4 else "")
            warnings.warn(
                f"{len(found)} parameters were frozen when the model was given to tw.distribute and have gradients now "
                f"({names}): they are not exchanged, and workers will differ in them. Unfreeze them before "
                "tw.distribute, or end this training and call it anew",
                UserWarning,
                stacklevel=4,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model, such as one of averaged weights, or one that is saved, takes part in nothing."""
        return _hooks_of_copy, ()

    def _before_model(self, own: list[int], *_: Any) -> None:
        if self._is_copy:
            return
        # Some modules use another's parameters without calling it (attention does). The first forward pass shows
        # which tables no call announces; from the second on, the model's own call waits for them.
        if self._worker.began and self._unreached is None:
            self._unreached = [index for index in range(len(self._tensors)) if index not in self._reached]
        if not self._rests():
            self._pull({*own, *(self._unreached or ())})

    def _before_layer(self, own: list[int], *_: Any) -> None:
        if self._is_copy:
            return
        self._reached.update(own)
        if not self._rests():
            self._pull(own)

    def _rests(self) -> bool:
        """Whether no layer has anything to do. A graph that torch traces holds in all steps: there each layer asks."""
        return not torch.compiler.is_compiling() and self._worker.idle

    def _pull_now(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._worker.awaits(self._tensors[index]):
                self._driver.run(self._worker.pull(self._tensors[index]))

    def _after_gradient(self, tensor: WorkerTensor, _parameter: torch.Tensor) -> None:
        if not self._worker.idle and self._worker.heeds(tensor):
            self._driver.run(self._worker.gradient_ready(tensor))


def _hooks_of_copy() -> ModelHooks:
    hooks = ModelHooks.__new__(ModelHooks)
    hooks._is_copy = True
    return hooks


def _place(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"
