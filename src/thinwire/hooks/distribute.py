"""`tw.distribute`: an unmodified model and optimizer, trained through a parameter server.

The wrapped optimizer keeps its interface; its arithmetic runs on the server. A parameter's gradient is encoded and
pushed as soon as the backward pass has produced it; a layer's delta is waited for and applied when the forward
pass first reaches that layer (3LC §4.1, "incremental pull"). So communication runs while the model computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from thinwire.codecs import Codec, Context
from thinwire.codecs.registry import codec as make_codec
from thinwire.errors import ConfigError, NonFiniteError, ProtocolError
from thinwire.hooks.planning import Planned, make_plan
from thinwire.hooks.replica import Replica
from thinwire.policies.compression import MIN_NUMEL, ByShape, Compression
from thinwire.runtime.connect import connect
from thinwire.runtime.session import Session
from thinwire.telemetry import Counters
from thinwire.transports.base import Connection
from thinwire.worker.core import CHUNK_NBYTES, WorkerCore

NO_GRADIENT = b""


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    server: str | Connection,
    rank: int = 0,
    workers: int = 1,
    codec: str | Codec = "3lc",
    codec_down: str | Codec | None = None,
    min_numel: int = MIN_NUMEL,
    exclude: Callable[[str, tuple[int, ...]], bool] | None = None,
    compression: Compression | None = None,
    reduce: Literal["mean", "sum"] = "mean",
    overlap: bool = True,
    seed: int = 0,
    chunk_nbytes: int = CHUNK_NBYTES,
    state_interval: int = 50,
    timeout_s: float = 600.0,
    connect_timeout_s: float = 30.0,
    **options: Any,
) -> DistributedOptimizer:
    """Joins a training and returns an optimizer to use in place of `optimizer`.

    Every worker calls it with the same model and the same arguments but `rank`. Worker 0's weights become
    everybody's. The optimizer's class and options are sent to the server, which runs it; the learning rate is read
    from `param_groups` at every step, so any scheduler works.

    Args:
        model: any module; its parameters may be of any floating dtype, on any device.
        optimizer: a stock torch optimizer over the model's parameters.
        server: `grpc://host:port`, or an open connection.
        rank: this worker's number, 0 … workers − 1.
        workers: how many workers train together.
        codec: of the pushes; an id with `**options`, or a codec.
        codec_down: of the pulls; by default the same.
        min_numel: tensors with fewer values travel uncompressed, as do biases and norm layers.
        exclude: further tensors to leave uncompressed, by name and shape.
        compression: a policy that replaces all of the five arguments above.
        reduce: the mean over the gradients that came, or their sum.
        overlap: False pushes at `step()`, which leaves room for gradient clipping between backward and step.
        seed: of random codecs; each rank derives its own stream.
        chunk_nbytes: a push leaves as soon as so many bytes of frames are ready.
        state_interval: batch-norm statistics of worker 0 go to the others after every so many steps.
        timeout_s: how long the slowest worker may keep the others waiting, in seconds.
        connect_timeout_s: how long the server may take to appear, in seconds.
        **options: of the codec, such as `sparsity=1.75`.

    Raises:
        ConfigError: arguments that cannot be.
        DeadlineError: no server at that address.
        ProtocolError: the server refuses this worker, for instance for a tensor of another shape.
    """
    if not 0 <= rank < workers:
        raise ConfigError(f"rank={rank} with workers={workers}; ranks are 0 … workers − 1")
    if reduce not in ("mean", "sum"):
        raise ConfigError(f"reduce={reduce!r}; allowed are 'mean' and 'sum'")
    if state_interval < 1 or chunk_nbytes < 1:
        raise ConfigError(f"state_interval={state_interval} and chunk_nbytes={chunk_nbytes} must be at least 1")
    if compression is None:
        up = _codec(codec, options)
        down = up if codec_down is None else _codec(codec_down, options if isinstance(codec_down, str) else {})
        compression = ByShape(up=up, down=down, min_numel=min_numel, exclude=exclude)
    planned = make_plan(model, optimizer, compression, workers=workers, reduce=reduce, state_interval=state_interval)
    connection = connect(server, connect_timeout_s=connect_timeout_s)
    session = Session(connection, WorkerCore(rank, planned.plan, chunk_nbytes=chunk_nbytes), timeout_s=timeout_s)
    try:
        return DistributedOptimizer(model, optimizer, planned, session, overlap=overlap, seed=seed)
    except BaseException:
        connection.close()
        raise


def _codec(codec: str | Codec, options: dict[str, Any]) -> Codec:
    if isinstance(codec, str):
        return make_codec(codec, **options)
    if options:
        raise ConfigError(f"options {sorted(options)} belong to a codec's id; {codec!r} is a codec already")
    return codec


class DistributedOptimizer(torch.optim.Optimizer):
    """The optimizer of one worker. `step`, `zero_grad`, `param_groups` and schedulers work as they always do.

    Example::

        opt = tw.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), server="grpc://10.0.0.1:7070",
                            rank=rank, workers=4, codec="3lc", sparsity=1.75)
        with opt:
            for x, y in batches:
                opt.zero_grad()
                loss(model(x), y).backward()
                opt.step()
            opt.sync()          # before evaluating or saving the model
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        planned: Planned,
        session: Session,
        *,
        overlap: bool,
        seed: int,
    ) -> None:
        super().__init__([{"params": list(group["params"])} for group in optimizer.param_groups], optimizer.defaults)
        # One list for both, so that a scheduler made for either moves the rate of both.
        self.param_groups = optimizer.param_groups
        self.counters = Counters()
        self._session = session
        self._core = session.core
        self._specs = planned.plan.tables
        self._overlap = overlap
        self._accumulating = False
        self._last = False
        self._closed = False
        self._replicas = [Replica(tensor) for tensor in planned.tensors]
        self._parameters = planned.tensors
        self._contexts: list[Context | None] = [
            None if spec.state else codec.context(tensor, name=spec.name, seed=seed * 65_537 + self._core.rank)
            for spec, codec, tensor in zip(self._specs, planned.up, planned.tensors, strict=True)
        ]
        self._index = {id(tensor): index for index, tensor in enumerate(planned.tensors)}
        self._reached: set[int] = set()
        self._unreached: list[int] | None = None
        self._start()
        self._handles = self._hook(model)

    # ---- the optimizer's interface

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the step: pushes what has not left yet. The model changes when it is next used, or at `sync()`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_open()
        for table in self._core.unpushed():
            self._push(table)
        self._push_state()
        self._session.send(self._core.flush(self._rates(), last=self._last))
        self._core.advance()
        self.counters.add("steps", 1)
        return loss

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate gradients; the next one outside pushes the sum."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def sync(self) -> None:
        """Waits for, and applies, everything up to the last step: call it before evaluating or saving the model."""
        self._check_open()
        for table in range(len(self._specs)):
            self._pull(table)

    def stop_after_this_step(self) -> None:
        """Worker 0 says, before a step's backward pass, that this step is the last for everyone."""
        self._last = True

    @property
    def finished(self) -> bool:
        """Whether worker 0 ended the training with the last step. Waits for the server's word on that step."""
        return self._core.step > 0 and self._session.is_last()

    @property
    def steps_done(self) -> int:
        """Steps taken so far."""
        return self._core.step

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's residuals, random streams, step and parameter-group options."""
        return {
            "step": self._core.step,
            "contexts": {
                spec.name: context.state_dict()
                for spec, context in zip(self._specs, self._contexts, strict=True)
                if context is not None
            },
            "param_groups": [
                {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave, by parameter name.

        Raises:
            ConfigError: a parameter of this model is missing in the state.
        """
        contexts = state_dict["contexts"]
        for spec, context in zip(self._specs, self._contexts, strict=True):
            if context is None:
                continue
            if spec.name not in contexts:
                raise ConfigError(f"the state has no residual for {spec.name!r}; it has {sorted(contexts)[:8]} …")
            context.load_state_dict(contexts[spec.name])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)

    def close(self) -> None:
        """Leaves the training in good order. The model stays usable; further steps are refused."""
        if not self._closed:
            self._closed = True
            for handle in self._handles:
                handle.remove()
            self._session.close()

    def __enter__(self) -> DistributedOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def traffic(self) -> dict[str, float]:
        """Returns this worker's sums so far: payload and wire bytes and values each way, and seconds by purpose."""
        sent, received = self._session.wire_nbytes
        return {
            **self.counters.snapshot(),
            **self._session.counters.snapshot(),
            "wire_bytes_push": sent,
            "wire_bytes_pull": received,
        }

    def residual_ratios(self) -> dict[str, float]:
        """Returns, per parameter, ‖residual‖ in units of the last gradient's norm: how many steps are waiting."""
        ratios = {}
        for spec, context, parameter in zip(self._specs, self._contexts, self._parameters, strict=True):
            if context is not None and context.residual is not None and parameter.grad is not None:
                norm = float(parameter.grad.norm())
                ratios[spec.name] = float(context.residual.norm()) / norm if norm else 0.0
        return ratios

    # ---- how it works

    def _start(self) -> None:
        """Joins; worker 0's weights become everybody's."""
        if self._session.join():
            frames = tuple(make_codec("fp32").encode(replica.values) for replica in self._replicas)
            self._session.send(self._core.initial(frames))
        else:
            for table in range(len(self._specs)):
                self._pull(table)

    def _hook(self, model: nn.Module) -> list[Any]:
        handles: list[Any] = []
        for module in model.modules():
            tables = [
                self._index[id(tensor)]
                for tensor in (*module._parameters.values(), *module._buffers.values())
                if tensor is not None and id(tensor) in self._index
            ]
            if tables and module is not model:
                handles.append(module.register_forward_pre_hook(self._forward_hook(tables)))
        handles.append(model.register_forward_pre_hook(self._root_hook(model)))
        for table, (spec, parameter) in enumerate(zip(self._specs, self._parameters, strict=True)):
            if not spec.state:
                register: Any = parameter.register_post_accumulate_grad_hook  # untyped in torch
                handles.append(register(self._gradient_hook(table)))
        return handles

    def _forward_hook(self, tables: list[int]) -> Callable[..., None]:
        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            self._reached.update(tables)
            for table in tables:
                self._pull(table)

        return before_forward

    def _root_hook(self, model: nn.Module) -> Callable[..., None]:
        own = [self._index[id(p)] for p in model._parameters.values() if p is not None and id(p) in self._index]

        def before_model(_module: nn.Module, _inputs: Any) -> None:
            # Some modules use another's parameters without calling it (attention does). The first forward pass
            # shows which tables no call announces; from the second on, the model's own call waits for them.
            if self._core.step > 0 and self._unreached is None:
                self._unreached = [t for t in range(len(self._specs)) if t not in self._reached]
            for table in {*own, *(self._unreached or ())}:
                self._pull(table)

        return before_model

    def _gradient_hook(self, table: int) -> Callable[[torch.Tensor], None]:
        def after_accumulate(_parameter: torch.Tensor) -> None:
            if self._core.wants(table):
                raise ProtocolError(
                    f"{self._specs[table].name!r} was used before its last update was applied: its module was not "
                    "called through the model. Call opt.sync() before such a forward pass"
                )
            if self._overlap and not self._accumulating:
                self._push(table)

        return after_accumulate

    def _push(self, table: int) -> None:
        self._check_open()
        context, parameter = self._contexts[table], self._parameters[table]
        assert context is not None
        frame = NO_GRADIENT
        if parameter.grad is not None:
            begin = time.perf_counter()
            try:
                frame = context.encode(parameter.grad)
            except NonFiniteError as error:
                raise NonFiniteError(f"gradient of {error}") from None
            self.counters.add("encode_seconds", time.perf_counter() - begin)
            self.counters.add("payload_bytes_push", context.payload_nbytes)
            self.counters.add("values_push", parameter.numel())
        self._session.send(self._core.push(table, frame, self._rates(), last=self._last))

    def _push_state(self) -> None:
        if self._core.rank != 0 or self._core.step % self._core.plan.state_interval:
            return
        for table, spec in enumerate(self._specs):
            if spec.state:
                self._replicas[table].refresh()
                frame = make_codec("fp32").encode(self._replicas[table].values)
                self.counters.add("payload_bytes_push", self._replicas[table].values.nbytes)
                self.counters.add("values_push", self._replicas[table].values.size)
                self._session.send(self._core.push(table, frame, self._rates(), last=self._last))

    def _pull(self, table: int) -> None:
        if not self._core.wants(table):
            return
        updates = self._session.take(table)
        begin = time.perf_counter()
        payload_nbytes, num_values = self._replicas[table].apply(updates)
        self.counters.add("decode_seconds", time.perf_counter() - begin)
        self.counters.add("payload_bytes_pull", payload_nbytes)
        self.counters.add("values_pull", num_values)

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for group in self.param_groups)

    def _check_open(self) -> None:
        if self._closed:
            raise ProtocolError("this worker has left the training; close() was called")

