"""Reads step records from a file of JSON lines that may still grow, on this machine or at an address.

Reading does not disturb the training, and tolerates the partial lines of killed processes: every call of `read` opens
the file anew, reads complete lines, and counts lines that are no records.
"""

from __future__ import annotations

import http
import http.client
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from thinwire.errors import ConfigError, TransportError
from thinwire.telemetry import StepRecord

_CHUNK_NBYTES = 1 << 22
_MARK_NBYTES = 4096
"""The last bytes read are kept: if the file has other bytes there, it is another file."""
MAX_LINE_NBYTES = 1 << 20
"""A record takes some 400 bytes; a line of more bytes than this belongs to some other file."""
_TIMEOUT_S = 5.0
_MOST = 1e18
"""No time, count or norm is larger."""
_NUMBERS = (
    *("step", "rank", "numel", "payload_bytes_push", "payload_bytes_pull", "staleness", "itemsize", "ways"),
    *("time_s", "encode_s", "decode_s", "wait_s", "residual_norm", "residual_lag", "link_bps"),
    *("taken", "wire_nbytes", "plain_nbytes", "version"),
)


class RecordFile:
    """A file of step records, followed as it grows.

    Args:
        path: of the file, which need not exist yet.
        newest_nbytes: the first read skips all but this many bytes at the end of the file; None: it skips none.

    Attributes:
        damaged: lines so far that are no step records, or have impossible numbers.

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
        self._offset, self._mark = 0, b""  # the number of bytes read, and the last ones
        self._decoder = msgspec.json.Decoder(StepRecord)

    def read(self, *, ended: bool = False) -> Iterator[StepRecord]:
        """Yields the records of lines that were completed since the last call; none if the file does not exist.

        Args:
            ended: the file grows no more: the bytes after the last line break are a line, too.

        Raises:
            ConfigError: the file cannot be read.
            TransportError: no server answers at the address in time.
        """
        while (chunk := self._chunk(self._offset - len(self._mark))) is not None:
            if not chunk.startswith(self._mark):  # the file was emptied or replaced
                self._offset, self._mark = 0, b""
                continue
            lines, last = chunk[len(self._mark) :], len(chunk) < _CHUNK_NBYTES
            if not (ended and last):
                whole = lines.rfind(b"\n") + 1
                lines = lines[:whole] if whole or len(lines) <= MAX_LINE_NBYTES else lines
            self._offset, self._mark = self._offset + len(lines), (self._mark + lines)[-_MARK_NBYTES:]
            yield from self._records(lines)
            if last:
                return

    def _chunk(self, start: int) -> bytes | None:
        """Returns some bytes of the file from `start` on; None if there is no file."""
        try:
            if self.path.exists() and not self.path.is_file() and not self.path.is_dir():  # reading a pipe would block
                raise ConfigError(
                    f"{self.path} is no file but a pipe or a device: give the file that --telemetry wrote"
                )
            with self.path.open("rb") as file:
                newest, self._newest = self._newest, None
                if newest is not None and (first := file.seek(0, 2) - newest) > 0:
                    file.seek(first)
                    self._offset = start = first + len(file.readline(MAX_LINE_NBYTES))
                file.seek(start)
                return file.read(_CHUNK_NBYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _records(self, lines: bytes) -> Iterator[StepRecord]:
        for line in filter(bytes.strip, lines.splitlines()):
            try:
                record = self._decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self.damaged += 1
                continue
            possible = all(0 <= (getattr(record, name) or 0) < _MOST for name in _NUMBERS)
            possible = possible and all(0 <= each < _MOST for learner in record.learners for each in learner)
            if possible and 0 <= record.share <= 1 and 0 <= (record.accuracy or 0.0) <= 100:
                yield record
            else:
                self.damaged += 1


class RecordAddress(RecordFile):
    """A file of step records at an address, followed as it grows.

    Args:
        url: of the file, as in `http://host:port/steps.jsonl`.
    """

    def __init__(self, url: str) -> None:
        super().__init__(Path())
        self.url = url
        # Ignores the environment's proxies, as gRPC does: the file is on this machine, or at a tunnel's end.
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _chunk(self, start: int) -> bytes:
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={start}-{start + _CHUNK_NBYTES - 1}"})
        try:
            _ = urlsplit(self.url).port  # no other call checks it: 65536 more would be the same port
            with self._direct.open(request, timeout=_TIMEOUT_S) as answer:
                skipped = 0 if answer.status == http.HTTPStatus.PARTIAL_CONTENT else start
                found: bytes = answer.read(skipped + _CHUNK_NBYTES)
                return found[skipped:]
        except (OSError, ValueError, http.client.HTTPException) as error:
            if getattr(error, "code", None) == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return b""
            raise TransportError(
                f"{self.url} cannot be read: {getattr(error, 'reason', error)}. Give the address of a file that "
                "--telemetry writes, as in http://127.0.0.1:8000/steps.jsonl"
            ) from error
