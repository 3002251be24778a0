"""Metrics writers, which store step records: in a file of JSON lines, at a Prometheus endpoint, in TensorBoard.

A writer accepts one record at a time, from one thread, and is closed when training ends. Its constructor imports the
library that it needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from thinwire.cautions import notice
from thinwire.errors import ConfigError, TransportError
from thinwire.extras import require
from thinwire.runtime.line_file import LineFile
from thinwire.telemetry import StepRecord

_GAUGES = {
    "bits_per_value_push": "Payload bits sent per value in the latest step",
    "bits_per_value_pull": "Payload bits received per value in the latest step",
    "staleness": "Updates that the model of the latest step lacked",
    "residual_norm": "2-norm of the residual",
    "residual_lag": "2-norm of the residual, in units of one step's update",
}
_SCORES = {
    "loss": "Training loss of the latest step",
    "accuracy": "Latest test accuracy, 0 to 1",
    "link_bps": "Bits per second of the slowest link between ranks",
}
_SIZES = {
    "numel": "Values of the table",
    "itemsize": "Bytes of one value in the tensor's own dtype",
    "ways": "How many ways the values travel",
    "share": "Part of the values that crosses a link each way, 0 to 1",
    "step": "Number of the step that was recorded last, from 0",
}
_SECONDS = ("encode_s", "decode_s", "wait_s")


class MetricsWriter(Protocol):
    """Stores step records."""

    def record(self, record: StepRecord) -> None:
        """Stores one table's step."""
        ...

    def close(self) -> None:
        """Writes buffered records, and releases files and ports. A second call has no effect."""
        ...


class JsonLines:
    """Appends one JSON object a line to a file, without buffering, so that a reader can follow the file.

    Workers on one machine may share a file; a full disk is one warning, see `LineFile`. NaN and infinity, which JSON
    lacks, become null.

    Args:
        path: the file; created if missing, with its folder.

    Raises:
        ConfigError: the file cannot be opened for writing.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "steps.jsonl"
        >>> writer = JsonLines(path)
        >>> writer.record(StepRecord(step=0, table="fc.weight", numel=1000, payload_bytes_push=200))
        >>> writer.close()
        >>> path.read_text()[:71]
        '{"step":0,"table":"fc.weight","numel":1000,"rank":0,"codec":"","payload'
    """

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(Path(path), "step records")

    def record(self, record: StepRecord) -> None:
        self._file.write(msgspec.json.encode(record.as_dict()))

    def close(self) -> None:
        self._file.close()


class Prometheus:
    """Serves the sums and the latest values of every table at `http://host:port/metrics`, in another thread.

    All names begin with `thinwire_` and have the labels `table` and `rank`: the counters `payload_bytes_total`
    (`direction` push or pull), `seconds_total` (`phase` encode, decode or wait), `steps_total` and
    `skipped_steps_total`; gauges are named as in `StepRecord`. Values of a whole step have an empty `table`.

    Args:
        port: TCP port; 0 chooses a free one, see `port`.
        host: address to listen at. The endpoint has no authentication, so by default only this machine can reach it.

    Raises:
        TransportError: the port is in use, or the address is not this machine's.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        require("serving metrics", "prometheus_client")
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        registry, labels = CollectorRegistry(), ("table", "rank")
        self._bytes, self._seconds, self._steps, self._skipped = (
            Counter(f"thinwire_{name}", about, (*labels, *further), registry=registry)
            for name, about, *further in (
                ("payload_bytes", "Bytes of codec payload", "direction"),
                ("seconds", "Seconds spent encoding, decoding and waiting", "phase"),
                ("steps", "Steps recorded"),
                ("skipped_steps", "Steps that did not change the table"),
            )
        )
        self._gauges = {
            name: Gauge(f"thinwire_{name}", about, labels, registry=registry)
            for name, about in (_GAUGES | _SIZES | _SCORES).items()
        }
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise TransportError(f"metrics cannot be served at {host}:{port}: {error}; choose another port") from error
        self.port: int = self._server.server_port

    def record(self, record: StepRecord) -> None:
        labels = (record.table, str(record.rank))
        for name in _SECONDS:
            self._seconds.labels(*labels, name.removesuffix("_s")).inc(getattr(record, name))
        if record.table:
            self._bytes.labels(*labels, "push").inc(record.payload_bytes_push)
            self._bytes.labels(*labels, "pull").inc(record.payload_bytes_pull)
            self._steps.labels(*labels).inc()
            self._skipped.labels(*labels).inc(record.skipped)
        for name in _GAUGES | _SIZES if record.table else _SCORES:
            if (value := getattr(record, name)) is not None:
                self._gauges[name].labels(*labels).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class TensorBoard:
    """Writes scalars for TensorBoard, one chart per quantity and table: `bits_per_value_push/fc.weight`, …

    A quantity of the whole step has its name alone: `loss`. A full disk is one warning: training continues, and the
    charts end there.

    Args:
        folder: of the event file; one folder per run and worker.

    Raises:
        ConfigError: TensorBoard is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder, self._ended = folder, False
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"TensorBoard is not installed ({error}); pip install tensorboard") from error
        try:
            self._writer = SummaryWriter(str(folder))
        except OSError as error:
            raise ConfigError(f"TensorBoard cannot write to {str(folder)!r}: {error.strerror or error}") from error

    def record(self, record: StepRecord) -> None:
        of_table = (*_GAUGES, *_SECONDS, "payload_bytes_push", "payload_bytes_pull", "skipped") if record.table else ()
        of_step = [] if record.table else [name for name in _SECONDS if getattr(record, name)]
        for name in (*of_table, *of_step, *_SCORES):
            if not self._ended and (value := getattr(record, name)) is not None:
                tag = f"{name}/{record.table}" if record.table else name
                try:
                    self._writer.add_scalar(tag, float(value), record.step)
                except OSError as error:  # of an earlier scalar: TensorBoard's own thread writes
                    self._end(error)

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        """Stops writing, and warns of that once."""
        if not self._ended:
            self._ended = True
            notice(
                f"TensorBoard's charts are no longer written to {str(self._folder)!r}: {error.strerror or error}. "
                "Training continues without them"
            )
