"""Averages tensors over the ranks by name, compressed: for training code without hooks.

A functional training step, a loop over several models or a custom framework calls
`state.average({"name": gradient, …})` in place of `dist.all_reduce(gradient)`. A codec keeps a residual for the next
step, which belongs to one tensor, identified by its name. A backend for `dist.init_process_group` would have to guess:
a call of `all_reduce` has no name, DDP rebuilds its buckets after the first step, and two tensors of one size would
share a residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from thinwire.codecs import Codec
from thinwire.codecs.tensors import check_out
from thinwire.collective.core import Bucket
from thinwire.collective.trained import TrainedTensor
from thinwire.errors import ConfigError
from thinwire.hooks.exchange.options import ExchangeOptions
from thinwire.hooks.exchange.ranks import check_floating
from thinwire.hooks.exchange.saved import merge, row_major
from thinwire.hooks.exchange.state import ExchangeState
from thinwire.hooks.report import Report, report

__all__ = ["ExchangeOptions", "NamedState", "Report", "compress", "merge", "report"]


class NamedState(ExchangeState):
    """The state that `named.compress` returns, an `ExchangeState`: call `average` every step."""

    def __init__(self, *, tensors: Mapping[str, torch.Tensor], **kept: Any) -> None:
        super().__init__(layouts=row_major(tensors), **kept)
        self._buckets = {name: Bucket(((name, 0),), tensor.nbytes) for name, tensor in tensors.items()}
        self._shapes = {name: (tensor.shape, tensor.dtype, tensor.device) for name, tensor in tensors.items()}

    def average(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replaces every tensor by its average over the ranks, in place; all ranks call it.

        Args:
            tensors: all that `compress` was given, by the same names, in any order, with their shapes and dtypes.

        Raises:
            ConfigError: other names, shapes or dtypes, or an expanded view, which cannot be written; no message was
                sent, and no residual has changed.
            NonFiniteError: NaN or Inf on some rank, with `nonfinite="raise"`.
            TransportError, ProtocolError: another rank is gone, or at another step.
        """
        self._check(tensors)
        self.driver.check_open()
        self.driver.raise_failure()
        self.begin_step()
        flat = {name: tensors[name].detach().contiguous().view(-1) for name in self._buckets}
        for index, (name, bucket) in enumerate(self._buckets.items()):
            self.driver.bucket_ready(bucket, flat[name], self.step, index, last=index == len(flat) - 1)
        self.driver.wait_step()
        for name, averaged in flat.items():
            if averaged.data_ptr() != tensors[name].data_ptr():
                tensors[name].detach().copy_(averaged.view(tensors[name].shape))
        self.step += 1
        self.between_steps()

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(tensors, Mapping) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            raise ConfigError(f"average takes tensors by name, as compress was given; {type(tensors).__name__} came")
        if tensors.keys() != self._shapes.keys():
            missing, more = self._shapes.keys() - tensors.keys(), tensors.keys() - self._shapes.keys()
            raise ConfigError(
                "average takes the tensors that compress was given, all of them every time: "
                f"{', '.join(sorted(missing)) or 'none'} missing, {', '.join(sorted(more)) or 'none'} unknown"
            )
        for name, tensor in tensors.items():
            if (found := (tensor.shape, tensor.dtype, tensor.device)) != self._shapes[name]:
                raise ConfigError(f"{name}: {_text(*found)} came, and compress was given {_text(*self._shapes[name])}")
            try:
                check_out(tensor, tuple(tensor.shape))
            except ConfigError as error:
                raise ConfigError(f"{name}: the average cannot be written: {error}") from None
            if tensor.is_inference():
                raise ConfigError(
                    f"{name}: a tensor of torch.inference_mode(), into which no average can be written; take "
                    "torch.no_grad() in its place"
                )
        _check_apart(tensors)


def compress(
    tensors: Mapping[str, torch.Tensor],
    codec: str | Codec = "3lc",
    *,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> NamedState:
    """Prepares tensors to be averaged over the ranks, compressed both ways with error feedback.

    Call it on every rank, with the same names and shapes in the same order. Compressed bytes are sent over a separate
    gloo group.

    Args:
        tensors: by name; only their shapes, dtypes and devices matter.
        codec: an id with its options, or a codec.
        group: the ranks that average; by default all.
        **options: those of the codec, such as `sparsity=1.0`, and those of `named.ExchangeOptions`, such as
            `reduce="sum"`: `help(named.ExchangeOptions)` describes them. Tensors of one dimension are not compressed.

    Returns:
        The state: call its `average` every step.

    Raises:
        ConfigError: no tensors, one that is not of floating point, or invalid arguments.
        ProtocolError: ranks with different tensors, another order of them, settings or tokens; the message names rank
            and setting.
        TransportError: a rank did not connect.

    Example::

        state = named.compress({"w": w, "b": b}, codec="3lc", sparsity=1.0)
        for x, y in batches:
            gradients = grad(loss)({"w": w, "b": b}, x, y)      # torch.func
            state.average(gradients)                            # in place of dist.all_reduce on each
    """
    without = ("start_step", "last_layer", "compression", "lag_limit", "target")
    asked = ExchangeOptions.of(codec, options, without)
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"expected tensors by name, as in {{'w': w}}; {type(tensors).__name__} came")
    if not tensors:
        raise ConfigError("there are no tensors to average")
    for name, tensor in tensors.items():
        _check_kind(name, tensor)
    choices = asked.choices({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    trained = [TrainedTensor(name, t.numel(), t.dtype, choices[name], t.device) for name, t in tensors.items()]
    over = group or dist.group.WORLD
    if over is None:
        raise ConfigError("there is no process group: call dist.init_process_group first")
    if dist.get_rank() not in dist.get_process_group_ranks(over):
        raise ConfigError(f"rank {dist.get_rank()} is not in the group: only its ranks call named.compress")
    peers = asked.meet(dist.get_process_group_ranks(over), over)
    asked.agree(peers, trained, {})
    core = asked.core(trained, peers)
    return NamedState(tensors=tensors, core=core, peers=peers, options=asked)


def _check_kind(name: object, tensor: object) -> None:
    """Raises ConfigError for a value that cannot be averaged."""
    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"expected tensors by name; {name!r}: {type(tensor).__name__} came")
    check_floating(name, tensor.dtype)
    if tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "device_mesh"):
        kind = "a DTensor" if hasattr(tensor, "device_mesh") else f"{tensor.layout} on {tensor.device}"
        raise ConfigError(f"{name} is {kind}; dense tensors with values are averaged, of a DTensor its to_local()")


def _check_apart(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ConfigError if two tensors share values: each average would overwrite the other."""
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in by_storage.values():
        ends, ordered = 0, sorted(names, key=lambda name: tensors[name].data_ptr())
        for place, name in enumerate(ordered):
            tensor = tensors[name]
            if tensor.data_ptr() < ends:
                for earlier in ordered[:place]:
                    if _share(tensors[earlier], tensor):
                        raise ConfigError(f"{earlier} and {name} share memory (tied weights?): give it one name")
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ends = max(ends, tensor.data_ptr() + extent * tensor.itemsize)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views of one memory have values in common; interleaved rows have none."""
    if one.dtype != other.dtype:
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // one.itemsize, dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _text(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{tuple(shape)} of {dtype} on {device}"
