"""Codec ids → schemes: an explicit list, and the entry points `thinwire.codecs` of other packages.

The package makes one registry, used by `tw.codec` and `tw.decode`; all its codecs share scratch memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from thinwire import frames
from thinwire.cautions import caution
from thinwire.codecs.base import Codec
from thinwire.codecs.blocktopk import BlockTopK
from thinwire.codecs.decoding import CheckedFrame
from thinwire.codecs.entropy import Entropy
from thinwire.codecs.floats import BF16, FP16, FP32
from thinwire.codecs.int8 import Int8
from thinwire.codecs.levels import Votes
from thinwire.codecs.scheme import WRAPPER_OPTIONS, Scheme
from thinwire.codecs.scratch import ScratchPool
from thinwire.codecs.signs import OneBit
from thinwire.codecs.stochastic import TernGrad
from thinwire.codecs.tensors import Tensor, check_out, empty
from thinwire.codecs.threelc import ThreeLC
from thinwire.codecs.topk import TopK
from thinwire.errors import ConfigError, FrameError, guess
from thinwire.extras import in_lab
from thinwire.frames import Frame
from thinwire.names import DESIGNS, SHORT, parse_name
from thinwire.plugins import load, load_or_warn

SHIPPED: tuple[type[Scheme], ...] = (
    FP32,
    FP16,
    BF16,
    Int8,
    ThreeLC,
    TernGrad,
    Votes,
    OneBit,
    TopK,
    BlockTopK,
    Entropy,
)


class Registry:
    """Makes codecs by id, and decodes the frames of all of them.

    Args:
        schemes: listed first.
        pool: lends scratch memory to its codecs and decoders.
        group: the entry points of other packages' schemes; they are loaded when first needed.
    """

    def __init__(self, schemes: Sequence[type[Scheme]], pool: ScratchPool, group: str = "thinwire.codecs") -> None:
        self._schemes: dict[str, type[Scheme]] = {}
        self._pool, self._group, self._loaded = pool, group, False
        self._broken: dict[str, EntryPoint] = {}
        for scheme in schemes:
            self.register(scheme)

    def register(self, scheme: type[Scheme]) -> type[Scheme]:
        """Adds a scheme under its id.

        Raises:
            ConfigError: the id is taken by another class, or does not fit a frame.
        """
        if not isinstance(getattr(scheme, "id", None), str):
            raise ConfigError(f"{scheme!r:.80} has no id; a scheme names its codec id: id: ClassVar[str] = …")
        if not (0 < len(scheme.id) < 256 and scheme.id.isascii() and scheme.id.isprintable()):
            raise ConfigError(f"codec id {scheme.id!r}; it must be 1 to 255 printable ASCII characters")
        if self._schemes.setdefault(scheme.id, scheme) is not scheme:
            raise ConfigError(f"codec id {scheme.id!r} is taken by {self._schemes[scheme.id].__name__}")
        return scheme

    def ids(self) -> list[str]:
        """Returns the ids of all codecs, the shipped ones first."""
        self._load_plugins()
        return list(self._schemes)

    def find(self, codec_id: str) -> type[Scheme]:
        """Returns the scheme of a codec id. Raises ConfigError listing the ids where there is none."""
        if codec_id not in self._schemes:
            self._load_plugins()
        if codec_id == "auto" and codec_id not in self._schemes:
            raise ConfigError(
                "codec='auto' is of ddp.compress and fsdp.compress; all else, local updates too, takes a codec by its "
                f"name, one of {self.ids()}, and tw.distribute(model, optimizer) chooses H by itself"
            )
        if codec_id not in self._schemes:
            if codec_id in self._broken:
                load(self._broken[codec_id], Scheme)  # raises the reason
            if error := in_lab("codec", codec_id):
                raise error
            hint = guess(codec_id, [*self._schemes, "auto"])
            raise ConfigError(f"unknown codec {codec_id!r}{hint}; there are {self.ids()}")
        return self._schemes[codec_id]

    def codec(self, /, id: str, **options: Any) -> Codec:
        """Returns a codec.

        Args:
            id: one of `tw.codecs()`, with options in brackets or without, as in `3lc[s=1.75,entropy=zstd]`.
            **options: the codec's own (see `docs/codecs.md`) and those of every codec: `entropy`, `error_feedback`,
                `error_scale`, `nonfinite`; `s` is short for `sparsity`.

        Raises:
            ConfigError: an unknown id or option, or a value that is not allowed; the message lists the allowed ones.

        Example:
            >>> import thinwire as tw
            >>> tw.codec("3lc", sparsity=1.75).config()["sparsity"]
            1.75
            >>> tw.codec("3lc[s=1.75]") == tw.codec("3lc", sparsity=1.75)
            True
        """
        written, taken = id, dict[str, Any]()
        if isinstance(id, str) and "[" in id:
            id, taken = parse_name(id, "codec")
        if id in DESIGNS and id not in self.ids():
            raise ConfigError(
                f"{written!r} is a design, not a codec: tw.distribute(model, optimizer, design={written!r}) takes it"
            )
        scheme = self.find(id)
        allowed = [*WRAPPER_OPTIONS, *(field.name for field in fields(scheme))]
        for given, value in options.items():
            name = given if given in allowed else SHORT.get(given, given)
            if name in taken:
                raise ConfigError(f"{id}: {name!r} is given twice")
            taken[name] = value.item() if isinstance(value, np.generic) else value
        for name in taken:
            if name not in allowed:
                raise ConfigError(f"{id}: unknown option {name!r}{guess(name, allowed)}; there are {allowed}")
        around = {name: taken.pop(name) for name in WRAPPER_OPTIONS if name in taken}
        try:
            return Codec(scheme(**taken), pool=self._pool, **around)
        except TypeError as error:
            raise ConfigError(f"{id}: {error}") from error

    def decode(
        self,
        frame: bytes | bytearray | memoryview,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> torch.Tensor:
        """Decodes one frame of any codec.

        Args:
            frame: the bytes of exactly one frame.
            out: if given, filled in place and returned; any floating dtype, of the frame's shape.
            accumulate: adds into `out` instead of overwriting it, without a temporary for contiguous float32.

        Returns:
            A tensor of the encoded shape and dtype on the CPU; or `out`.

        Raises:
            FrameError: not a valid frame; `out` is then untouched.
            ConfigError: `out` does not fit, or `accumulate` without `out`.

        Example:
            >>> import torch, thinwire as tw
            >>> tw.decode(tw.codec("int8").encode(torch.tensor([1.27, -0.5])))
            tensor([ 1.2700, -0.5000])
        """
        if out is None and accumulate:
            raise ConfigError("accumulate=True adds into `out`, and no `out` was given")
        head = frames.parse(frame, copy=False)
        if out is not None:
            check_out(out, head.shape)  # before a zstd stage is undone, which allocates memory for the frame's shape
        checked = self.open_parsed(head)
        if out is not None:
            checked.decode(out, accumulate=accumulate)
            if not isinstance(out, torch.Tensor):
                return torch.from_numpy(out)
            if not out.is_inference():  # so that autograd refuses saved tensors which this overwrote
                increment_version(out)
            return out
        parsed = checked.frame
        try:
            result = empty(parsed.dtype, parsed.shape)
        except (RuntimeError, MemoryError) as error:
            raise FrameError(f"a tensor of shape {parsed.shape} does not fit this machine's memory") from error
        checked.decode(result, accumulate=False)
        return result

    def open_frame(self, frame: bytes | bytearray | memoryview) -> CheckedFrame:
        """Parses and checks a frame without decoding it.

        Raises:
            FrameError: not a valid frame.
        """
        return self.open_parsed(frames.parse(frame, copy=False))

    def open_parsed(self, parsed: Frame) -> CheckedFrame:
        """As `open_frame`, for receivers that check the header before a zstd stage is undone."""
        try:
            scheme = self.find(parsed.codec)
        except ConfigError as error:
            raise FrameError(f"the frame's codec is not registered here: {error}") from None
        return CheckedFrame.of(scheme, parsed, self._pool)

    def _load_plugins(self) -> None:
        if not self._loaded:
            for point in entry_points(group=self._group):
                if (scheme := load_or_warn(point, Scheme)) is None:
                    self._broken[point.name] = point
                elif not isinstance(getattr(scheme, "id", None), str):
                    caution(f"{point.name!r} ({point.group}) has no id and is left out")
                else:
                    self.register(scheme)
            self._loaded = True  # not where an id was taken: the next lookup raises again


_ours = Registry(SHIPPED, ScratchPool())
codec, find, ids, register = _ours.codec, _ours.find, _ours.ids, _ours.register
decode, open_frame, open_parsed = _ours.decode, _ours.open_frame, _ours.open_parsed
