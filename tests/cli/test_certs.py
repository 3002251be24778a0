"""`thinwire certs`: what it makes and shows next, and which names it takes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from json import loads
from pathlib import Path

import thinwire as tw
from tests.cli.commands import Result

Command = Callable[..., Result]


def test_certificates_are_made_once_and_the_next_commands_shown(command: Command, tmp_path: Path) -> None:
    folder, json = tmp_path / "certs", tmp_path / "out.json"
    result = command("certs", folder, "--workers", 3, "--host", "trainer.example.org", "--json", json)
    assert result.status == 0 and "the server's certificate is for trainer.example.org, " in result.out
    server, worker = result.out.splitlines()[-2:]
    assert shlex.split(server)[:2] == ["thinwire", "server"] and str(folder / "server.token") in server
    assert "server='grpc://trainer.example.org:7070'" in worker and "workers=3" in worker
    shown = eval(worker.partition("credentials=")[2][:-1], {"tw": tw})
    assert str(shown.token_file) == str(folder / "worker-0.token")
    found = loads(json.read_text())
    assert found["server"] == shlex.split(server) and found["worker"] == worker and len(list(folder.iterdir())) == 14
    again = command("certs", folder)
    assert again.status == 2 and "nothing is overwritten" in again.err
    result = command("certs", tmp_path / "six", "--workers", 1, "--host", "fd00::1")
    assert "server='grpc://[fd00::1]:7070'" in result.out
    result = command("certs", tmp_path / "port", "--workers", 1, "--host", "10.0.0.1:7070")
    assert result.status == 2 and "'10.0.0.1:7070' has a port, a path or a space in it" in result.err
    result = command("certs", tmp_path / "none", "--workers", 1, "--host", "")
    assert result.status == 2 and "--host '': give a name or an address" in result.err
    assert not (tmp_path / "none").exists()


def test_brackets_of_ipv6_are_taken_and_a_folder_that_cannot_be_is_one_line(command: Command, tmp_path: Path) -> None:
    result = command("certs", tmp_path / "six", "--workers", 1, "--host", "[2001:db8::1]", "--host", "[::1]")
    assert result.status == 0 and "certificate is for 2001:db8::1, ::1, " in result.out
    assert "server='grpc://[2001:db8::1]:7070'" in result.out
    result = command("certs", tmp_path / ("x" * 300), "--workers", 1)
    assert result.status == 2 and result.err.startswith("error: ") and "cannot be written: File name too" in result.err
