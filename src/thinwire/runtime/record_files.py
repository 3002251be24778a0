"""Reads step records back: from a file of JSON lines that may still grow, and from a Prometheus endpoint.

Strategy: whoever watches must not disturb whoever trains, nor stumble over what a process that was killed left behind.
The file is opened anew for every look, lines are taken when they are complete, and lines that are no records are
counted. Files of older versions lack fields, which then have their defaults.
"""

from __future__ import annotations

import http.client
import math
import stat
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from thinwire.errors import ConfigError, TransportError
from thinwire.extras import require
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
"""Of what an endpoint answers: some 100,000 tensors."""
_MOST_STEPS = 1000
"""Of so many steps between two looks at an endpoint records are made."""


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
    others = (record.staleness, record.itemsize, record.ways, record.serving_ranks)
    positive = record.residual_norm or 0.0, record.residual_lag or 0.0, record.link_bps or 0.0
    return (
        all(0 <= each <= _LONGEST_S for each in times)
        and all(0 <= each < _MOST for each in (*counts, *others))
        and 0 <= record.share <= 1
        and 0 <= (record.accuracy or 0.0) <= 100  # of who records per cent
        and all(0 <= each < math.inf for each in positive)
    )


class RecordEndpoint:
    """The Prometheus endpoint of one worker, read as if it were a file: what came since the last look, as records.

    An endpoint has sums and latest values: all steps of a table since the last look have their mean, and end evenly
    between the two looks. The first look finds all steps so far, of which one record with their mean is made.

    Args:
        url: of the endpoint, `http://host:port/metrics`.

    Attributes:
        damaged: 0, as of a file without damaged lines.
    """

    def __init__(self, url: str) -> None:
        self.url, self.damaged = url, 0
        # No proxy of the environment's, as gRPC takes none: an endpoint is on this machine, or at a tunnel's end.
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._before: dict[tuple[str, str], dict[str, float]] = {}
        self._last: dict[tuple[str, str], StepRecord] = {}

    def read(self) -> Iterator[StepRecord]:
        """Yields a record of every table and step since, in the order of steps, and one of the latest scores.

        Raises:
            ConfigError: prometheus_client is not installed.
            TransportError: nobody answers there, or not as such an endpoint does.
        """
        require("reading an endpoint", "prometheus_client")
        from prometheus_client.parser import text_string_to_metric_families

        try:
            _ = urlsplit(self.url).port  # which no other call looks at: 65536 more would be the same port
            with self._direct.open(self.url, timeout=_TIMEOUT_S) as answer:
                families = list(text_string_to_metric_families(_all_of(answer).decode()))
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise TransportError(
                f"{self.url} cannot be read: {reason}. Give the address that --metrics-port serves, "
                "as in http://127.0.0.1:9100/metrics"
            ) from error
        now, found = time.time(), dict[tuple[str, str], dict[str, float]]()
        for sample in (sample for family in families for sample in family.samples):
            labels = sample.labels
            rank = labels.get("rank", "")
            ours = sample.name.startswith("thinwire_") and rank.isascii() and rank.isdecimal() and len(rank) < 10
            if ours and (math.isfinite(sample.value) or sample.name == "thinwire_loss"):
                kind = labels.get("direction") or labels.get("phase") or ""
                sums = found.setdefault((labels.get("table", ""), labels["rank"]), {})
                sums[f"{sample.name.removeprefix('thinwire_')}{kind and '/' + kind}"] = sample.value
        records = list[StepRecord]()
        for (table, rank), values in found.items():
            if not table:  # what belongs to the step as a whole
                others = [each for (_, other), each in found.items() if other == rank]
                for name in ("steps_total", "step"):
                    if found_there := [each[name] for each in others if name in each]:
                        values[name] = max(found_there)
            key = table, rank
            record = _record_of(table, int(rank), values, self._before.get(key, {}), now)
            if record is not None:
                taken = int(values["steps_total"] - self._before.get(key, {}).get("steps_total", 0))
                records += _spread(record, taken, self._last.get(key))
                self._last[key] = record
        self._before = found
        # Whoever adds records up takes an earlier step behind a later one for a training that went back.
        yield from sorted(records, key=attrgetter("step"))


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


def _spread(record: StepRecord, taken: int, last: StepRecord | None) -> Iterator[StepRecord]:
    """Yields one record for each of so many steps, the last of which this is; of very many, for the newest."""
    if last is None or record.step - last.step < taken:
        yield record
        return
    scoreless = replace(record, loss=None, loss_finite=True, accuracy=None)  # the scores are of the last step
    for left in range(min(taken, _MOST_STEPS) - 1, -1, -1):
        part = left / taken
        yield replace(
            scoreless if left else record,
            step=record.step - round((record.step - last.step) * part),
            time_s=record.time_s - (record.time_s - last.time_s) * part,
        )


def _record_of(
    table: str, rank: int, values: dict[str, float], before: dict[str, float], now: float
) -> StepRecord | None:
    """Returns the means over the steps between two looks; None where there was none."""
    steps = int(values.get("steps_total", 0))
    taken = steps - int(before.get("steps_total", 0))
    if taken <= 0:
        return None

    def mean(name: str) -> float:
        return (values.get(name, 0) - before.get(name, 0)) / taken

    loss = values.get("loss")
    loss_finite = loss is None or math.isfinite(loss)
    return StepRecord(
        step=int(values.get("step", steps - 1)),  # an endpoint of before does not name it
        table=table,
        numel=int(values.get("numel", 0)),
        rank=rank,
        payload_bytes_push=round(mean("payload_bytes_total/push")),
        payload_bytes_pull=round(mean("payload_bytes_total/pull")),
        encode_s=mean("seconds_total/encode"),
        decode_s=mean("seconds_total/decode"),
        wait_s=mean("seconds_total/wait"),
        staleness=int(values.get("staleness", 0)),
        residual_norm=values.get("residual_norm"),
        residual_lag=values.get("residual_lag"),
        time_s=now,
        itemsize=int(values.get("itemsize", 4)),
        loss=loss if loss_finite else None,
        loss_finite=loss_finite,
        accuracy=values.get("accuracy"),
        ways=int(values.get("ways", 2)),
        link_bps=values.get("link_bps"),
        share=values.get("share", 1.0),
    )
