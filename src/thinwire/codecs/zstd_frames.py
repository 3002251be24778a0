"""The zstd stage of 3LC frames that a kernel wrote, or is to read: with one scale, and without their checksums."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs.entropy_stage import EntropyStage
from thinwire.errors import FrameError
from thinwire.frames import Flags, head
from thinwire.frames.layout import pack_varint, parse_varint

_SCALE_NBYTES = 5
"""How many scales there are, which is one, and a float32."""


@dataclass(frozen=True, slots=True)
class ZstdFrames:
    """One tensor's frames, with the stage and without.

    Args:
        plain: what they begin with, up to their scale, without the stage.
        staged: the same with it.
        max_nbytes: of a payload without the stage.
    """

    plain: bytes
    staged: bytes
    max_nbytes: int

    @classmethod
    def of(cls, version: int, codec: str, flags: int, shape: tuple[int, ...], max_nbytes: int) -> ZstdFrames:
        plain, staged = (head(version, codec, each, "fp32", shape) for each in (flags, flags | int(Flags.ZSTD)))
        return cls(plain, staged, max_nbytes)

    def shrink(
        self, frame: bytes | memoryview, payload_nbytes: int, stage: EntropyStage
    ) -> tuple[bytes | memoryview, int]:
        """Returns the frame with the stage, where that is smaller, and its payload's size.

        Args:
            frame: without it.
            payload_nbytes: of that frame.
            stage: to compress with.
        """
        payload = stage.compress(frame[len(frame) - payload_nbytes :])
        if payload is None:
            return frame, payload_nbytes
        scale = frame[len(self.plain) : len(self.plain) + _SCALE_NBYTES]
        return b"".join((self.staged, scale, pack_varint(len(payload)), payload)), len(payload)

    def expand(self, frame: bytes | memoryview, stage: EntropyStage) -> tuple[bytes | memoryview, int]:
        """Returns a frame with the stage as it was before it, and its payload's size as it travelled.

        Any other bytes are returned as they are, with 0, damaged frames among them: who decodes frames one by one finds
        what is wrong.
        """
        if frame[: len(self.staged)] != self.staged:
            return frame, 0
        view, end = memoryview(frame), len(self.staged) + _SCALE_NBYTES
        try:
            length, at = parse_varint(view, end, "the payload length")
            if length != len(view) - at:
                return frame, 0
            payload = stage.decompress(view[at:], self.max_nbytes)
        except FrameError:
            return frame, 0
        return b"".join((self.plain, view[len(self.staged) : end], pack_varint(len(payload)), payload)), length
