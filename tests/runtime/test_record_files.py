"""Files of records and of lines: read back as written, despite partial lines of a killed process or a full disk."""

from __future__ import annotations

import resource
import signal
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from thinwire.errors import ConfigError, TransportError
from thinwire.runtime.line_file import LineFile
from thinwire.runtime.metrics import JsonLines
from thinwire.runtime.record_files import MAX_LINE_NBYTES, RecordAddress, RecordFile
from thinwire.telemetry import StepRecord

RECORDS = [
    StepRecord(step=0, table="fc", numel=10, payload_bytes_push=3, residual_lag=1.5, time_s=7.0, itemsize=2),
    StepRecord(step=0, table="", numel=0, loss=0.5, accuracy=0.25),
]
OLD = (
    b'{"step":3,"table":"fc","numel":5,"rank":1,"codec":"3lc","payload_bytes_push":2,"payload_bytes_pull":1,'
    b'"encode_s":0.5,"decode_s":0.0,"wait_s":0.0,"staleness":0,"residual_norm":null,"residual_lag":null,'
    b'"skipped":false,"bits_per_value_push":3.2,"bits_per_value_pull":1.6}\n'
)
"""As it was written before records had times."""


def test_record_file_follows_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    file = RecordFile(path)
    assert list(file.read()) == []
    writer = JsonLines(path)
    for record in RECORDS:
        writer.record(record)
        assert list(file.read()) == [record]
    writer.close()
    with path.open("ab") as grows:
        grows.write(OLD[:40])
        grows.flush()
        assert list(file.read()) == [] and file.damaged == 0
        grows.write(OLD[40:])
    (old,) = file.read()
    assert (old.step, old.rank, old.encode_s, old.time_s, old.itemsize, old.loss) == (3, 1, 0.5, 0.0, 4, None)
    path.write_bytes(OLD)
    assert list(file.read()) == [old], "another file is in its place"
    longer = OLD.replace(b'"step":3', b'"step":4') + OLD
    path.write_bytes(longer)
    assert [record.step for record in file.read()] == [4, 3], "a longer one"
    other = tmp_path / "other.jsonl"
    other.write_bytes(longer.replace(b'"rank":1', b'"rank":2') + longer)
    other.replace(path)
    assert [record.step for record in file.read()] == [4, 3, 4, 3]
    assert list(file.read()) == []


def test_record_file_counts_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    wrong = [b'{"step":1,"tab', b"\xff\xfe", b'{"step":"one","table":"fc","numel":5}', b"[" * 5000, b"{}", b"1"]
    path.write_bytes(b"\n".join([*wrong, b"", OLD.strip(), b"x" * (MAX_LINE_NBYTES + 5), OLD.strip()]) + b"\n")
    file = RecordFile(path)
    assert [record.step for record in file.read()] == [3, 3] and file.damaged == len(wrong) + 1
    path.write_bytes(b"\x00" * (5 * MAX_LINE_NBYTES))
    binary = RecordFile(path)
    assert list(binary.read()) == [] and binary.damaged >= 1
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        list(RecordFile(tmp_path).read())


def test_record_file_reads_last_line_and_newest_bytes(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(OLD + OLD.strip())
    file = RecordFile(path)
    assert len(list(file.read())) == 1
    assert [record.step for record in file.read(ended=True)] == [3] and file.damaged == 0
    assert list(file.read(ended=True)) == [] and file.damaged == 0
    path.write_bytes(OLD + OLD[:40])
    cut = RecordFile(path)
    assert len(list(cut.read(ended=True))) == 1 and cut.damaged == 1
    path = tmp_path / "steps.jsonl"
    path.write_bytes(OLD * 100)
    file = RecordFile(path, newest_nbytes=3 * len(OLD) + 10)
    assert len(list(file.read())) == 3 and file.damaged == 0
    assert len(list(RecordFile(path, newest_nbytes=10**9).read())) == 100


@pytest.mark.parametrize("parts", [True, False])
def test_record_address_follows_growing_file(parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a server that sends parts of files, and from one that sends a file whole, past the environment's proxy."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    held = [b""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0]) if parts else 0
            told = held[0][first:]
            self.send_response(416 if first and not told else 206 if parts else 200)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        file = RecordAddress(f"http://127.0.0.1:{server.server_port}/steps.jsonl")
        line = b'{"step":3,"table":"fc","numel":5}\n'
        try:
            for held[0], steps in (
                (b"", []),
                (line, [3]),
                (line + line[:9], []),
                (line + b"no record\n" + line, [3]),
                (line[:9], []),  # another file
                (line.replace(b"3", b"7") * 4, [7] * 4),
            ):
                assert [record.step for record in file.read()] == steps
            assert file.damaged == 1
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(TransportError, match=r"steps\.jsonl cannot be read: .*refused.*--telemetry writes"):
        list(file.read())


def test_record_address_invalid_port_raises_transport_error() -> None:
    with pytest.raises(TransportError, match="Port out of range 0-65535"):
        list(RecordAddress("http://127.0.0.1:999999/steps.jsonl").read())


def test_line_file_full_disk_warns_once(tmp_path: Path) -> None:
    """No file of this process grows past 100 bytes for a moment, which ends like a full disk."""
    file = LineFile(tmp_path / "new" / "lines", "lines")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        for _ in range(4):
            file.write(b"x" * 24)
        with pytest.warns(UserWarning, match=r"lines are no longer written to .*Training continues"):
            file.write(b"x" * 24)
        file.write(b"x" * 24)  # of which there is no second warning: that would be an error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    file.close()
    assert (tmp_path / "new" / "lines").read_bytes() == (b"x" * 24 + b"\n") * 4
