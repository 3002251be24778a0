"""Reads step records back: from a file of JSON lines that may still grow, here or at an address.

Strategy: whoever watches must not disturb whoever trains, nor stumble over what a process that was killed left behind.
The file is opened anew for every look, lines are taken when they are complete, and lines that are no records are
counted.
"""

from __future__ import annotations

import http
import http.client
import math
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from thinwire.errors import ConfigError, TransportError
from thinwire.telemetry import StepRecord

_CHUNK_NBYTES = 1 << 22
_LONGEST_S = 1e12
"""A time above this, 30,000 years, was measured by no clock."""
_MOST = 1 << 62
"""Nothing that is counted comes to more."""
_MARK_NBYTES = 4096
"""The end of what was read is remembered: where something else stands there, it is another file."""
MAX_LINE_NBYTES = 1 << 20
"""A record takes some 400 bytes; a longer line than this is of some other file."""
_TIMEOUT_S = 5.0
_LONGEST_NBYTES = 1 << 26
"""Of what a server answers at once: some 160,000 records."""


class RecordFile:
    """A file of step records, followed as it grows.

    Args:
        path: of the file, which need not be there yet.
        newest_nbytes: of a file that is there already, only so much of its end is read; None: all.

    Attributes:
        damaged: lines so far that are no step records, or have numbers that cannot be.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "steps.jsonl"
        >>> file = RecordFile(path)
        >>> _ = path.write_text('{"step":0,"table":"fc","numel":5}\\n{"step":1,"tab')
        >>> [record.table for record in file.read()]
        ['fc']
    """

    def __init__(self, path: Path, newest_nbytes: int | None = None) -> None:
        self.path, self.damaged = path, 0
        self._newest = newest_nbytes
        self._offset: int | None = None
        self._mark = b""  # what stands before it
        self._decoder = msgspec.json.Decoder(StepRecord)

    def read(self, *, ended: bool = False) -> Iterator[StepRecord]:
        """Yields the records whose lines were completed since the last call; none while the file is not there.

        Args:
            ended: nobody writes any more, and what stands behind the last line break is a line as well.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            kind = stat.S_IFMT(self.path.stat().st_mode)
            if kind not in (stat.S_IFREG, stat.S_IFDIR):  # a pipe would be waited for
                raise ConfigError(
                    f"{self.path} is no file but a pipe or a device: give the file that --telemetry wrote"
                )
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if self._offset is None:
                    self._offset = 0 if self._newest is None else max(0, size - self._newest)
                    if self._offset:
                        file.seek(self._offset)
                        self._offset += len(file.readline(MAX_LINE_NBYTES))
                else:
                    file.seek(max(0, self._offset - len(self._mark)))
                    if size < self._offset or file.read(len(self._mark)) != self._mark:
                        self._offset, self._mark = 0, b""  # somebody emptied it or put another in its place
                file.seek(self._offset)
                while lines := self._next_lines(file.read(_CHUNK_NBYTES)):
                    self._pass(lines)
                    file.seek(self._offset)
                    yield from self._records(lines)
                if ended:
                    file.seek(self._offset)
                    self._pass(rest := file.read(MAX_LINE_NBYTES))
                    yield from self._records(rest)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _pass(self, lines: bytes) -> None:
        self._offset = (self._offset or 0) + len(lines)
        self._mark = (self._mark + lines[-_MARK_NBYTES:])[-_MARK_NBYTES:]

    @staticmethod
    def _next_lines(chunk: bytes) -> bytes:
        """Returns the chunk's complete lines; a line that is too long to be a record, as far as it is there."""
        end = chunk.rfind(b"\n") + 1
        return chunk[:end] if end or len(chunk) <= MAX_LINE_NBYTES else chunk

    def _records(self, lines: bytes) -> Iterator[StepRecord]:
        for line in lines.splitlines():
            if line.strip():
                try:
                    record = self._decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    self.damaged += 1
                    continue
                if _can_be(record):
                    yield record
                else:
                    self.damaged += 1


def _can_be(record: StepRecord) -> bool:
    """Whether a record's numbers are within what can be measured and counted; JSON has others."""
    times = record.time_s, record.encode_s, record.decode_s, record.wait_s
    counts = (record.step, record.rank, record.numel, record.payload_bytes_push, record.payload_bytes_pull)
    others = (record.staleness, record.itemsize, record.ways)
    positive = record.residual_norm or 0.0, record.residual_lag or 0.0, record.link_bps or 0.0
    return (
        all(0 <= each <= _LONGEST_S for each in times)
        and all(0 <= each < _MOST for each in (*counts, *others))
        and 0 <= record.share <= 1
        and 0 <= (record.accuracy or 0.0) <= 100  # of who records per cent
        and all(0 <= each < math.inf for each in positive)
    )


class RecordAddress(RecordFile):
    """A file of step records at an address, followed as it grows.

    Args:
        url: of the file, as in `http://host:port/steps.jsonl`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(Path())
        self.url = url
        # No proxy of the environment's, as gRPC takes none: the file is on this machine, or at a tunnel's end.
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, *, ended: bool = False) -> Iterator[StepRecord]:
        """Yields the records whose lines were completed since the last call.

        Raises:
            TransportError: no server answers there, or not in time.
        """
        taken = self._offset or 0
        first = max(0, taken - 1)  # the last line break: where another byte stands there, it is another file
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-"})
        try:
            _ = urlsplit(self.url).port  # which no other call looks at: 65536 more would be the same port
            with self._direct.open(request, timeout=_TIMEOUT_S) as answer:
                found = _all_of(answer)
                rest = found if answer.status == http.HTTPStatus.PARTIAL_CONTENT else found[first:]
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise self._unreadable(error) from error
            rest = b""
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._unreadable(error) from error
        if taken and rest[:1] != b"\n":
            self._offset = 0  # read anew at the next look
            return
        lines = self._next_lines(rest[taken - first :])
        self._offset = taken + len(lines)
        yield from self._records(lines)

    def _unreadable(self, error: Exception) -> TransportError:
        return TransportError(
            f"{self.url} cannot be read: {getattr(error, 'reason', error)}. Give the address of a file that "
            "--telemetry writes, as in http://127.0.0.1:8000/steps.jsonl"
        )


def _all_of(answer: http.client.HTTPResponse) -> bytes:
    """Reads an answer that must end soon: the timeout of a connection is of each of its bytes."""
    begin, found = time.monotonic(), bytearray()
    while chunk := answer.read1(1 << 16):
        found += chunk
        if len(found) > _LONGEST_NBYTES or time.monotonic() - begin > _TIMEOUT_S:
            raise ValueError(f"its answer does not end within {_TIMEOUT_S:g} s or {_LONGEST_NBYTES:,} bytes")
    if answer.length:  # which `read1` lets pass
        raise http.client.IncompleteRead(bytes(found), answer.length)
    return bytes(found)
