"""Help with examples, and errors in one line; what the lab's commands share is in the lab's own tests."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

import thinwire as tw
from tests.cli.commands import Result, check_help, refusing
from tests.server.conversation import Shard
from thinwire.cli import main
from thinwire.cli.options import split_names
from thinwire.errors import ConfigError
from thinwire.extras import LAB_COMMANDS
from thinwire.runtime import checkpoint

Command = Callable[..., Result]
COMMANDS = {"server", "certs", "plan", "watch", "report", "inspect", "codecs", "designs"}


def test_the_version(command: Command) -> None:
    result = command("--version")
    assert (result.status, result.out) == (0, f"thinwire {tw.__version__}\n")


def test_every_command_is_listed_and_its_help_has_an_example(command: Command) -> None:
    root = typer.main.get_command(main.app).commands  # type: ignore[attr-defined]
    assert root.keys() - LAB_COMMANDS == COMMANDS
    listed = re.findall(r"^\W*([\w-]+) {2,}\S", command("--help").out.partition("Commands")[2], re.MULTILINE)
    assert set(listed) >= COMMANDS
    for name in COMMANDS:
        check_help(command, root[name], name)
        assert "--json" in command(name, "--help").out or name == "server"


def test_help_and_misspelt_options_import_neither_torch_nor_what_a_command_computes_with() -> None:
    refusing(
        *(f"{name} --help" for name in sorted(COMMANDS)),
        *(f"{name} --no-such-option" for name in sorted(COMMANDS)),
        *("--help", "--version", "", "srever", "server --min-workers 0", "certs"),
    )


NO_LAB = """
import importlib.metadata as metadata, sys
found = metadata.entry_points
metadata.entry_points = lambda **given: [] if given == {"group": "thinwire.commands"} else found(**given)
from thinwire.cli.main import run
run()
"""


def test_a_command_of_the_lab_says_how_to_install_it() -> None:
    for name in ("demo", "bench"):
        done = subprocess.run([sys.executable, "-c", NO_LAB, name, "--help"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr.startswith(f"error: thinwire {name} comes with thinwire-lab") and done.stderr.count("\n") == 1
        )
        assert "pip install" in done.stderr


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


MISUSE: list[tuple[list[str], str]] = [
    (["watch", "127.0.0.1:9464"], "http://127.0.0.1:9464"),
    (["server", "--shape", "10"], "10mbit"),
    (["server", "--listen", "nowhere"], "'nowhere'"),
    (["server", "--listen", "0.0.0.0:0"], "--insecure"),
    (["server", "--tls-cert", __file__], "a certificate needs its key"),
    (["server", "--resume"], "say which with --checkpoint FILE"),
    (["server", "--resume", "--checkpoint", "no-such"], "'no-such'"),
    (["server", "--checkpoint-every", "5"], "--checkpoint FILE"),
    (["inspect", "no-such-file"], "no-such-file: No such file or directory"),
]


def test_misuse_is_one_line_and_status_2(command: Command) -> None:
    for arguments, text in MISUSE:
        result = command(*arguments)
        assert result.err.count("\n") == 1 and result.err.startswith("error: "), arguments
        assert result.status == 2 and text in result.err, result.err


def test_a_role_resumes_where_any_of_its_files_is_there(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    arguments = ("server", "--resume=auto", "--checkpoint", file, "--listen", "nowhere")
    assert "'nowhere' is no address" in command(*arguments).err, "there is none: it begins"
    (tmp_path / "file.previous").write_bytes(b"it was killed between two renames")
    assert "file.previous' is no checkpoint, or it is damaged" in command(*arguments).err
    replaced = command("server", "--checkpoint", file, "--listen", "nowhere")
    assert replaced.status == 2 and "file.previous' is the checkpoint of a training, which this one" in replaced.err


def test_a_server_that_resumes_at_the_end_says_that_nothing_is_left_to_train(command: Command, tmp_path: Path) -> None:
    """As where a volume outlives its training, and the next one of the same options finds it."""
    file, shard = tmp_path / "file", Shard()
    for step, last in enumerate((False, True)):
        for rank in (0, 1):
            shard.push(rank, step, shard.frames(rank, step), last=last)
        checkpoint.write(file, "server", step + 1, shard.core.state_dict())
    arguments = ("server", "--resume", "--checkpoint", file, "--listen", "nowhere")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert "has reached its end, step 2, and nothing is left to train" in command(*arguments).err
    assert "'nowhere' is no address" in command("server", "--resume=1", *arguments[2:]).err, "warnings are errors here"


def test_usage_is_explained_with_status_2(command: Command) -> None:
    for words in ("server --checkpoint-every 0", "server --lisen x", "server --resume=soon", "srever", "certs"):
        result = command(*words.split())
        assert result.status == 2, words
        assert "Usage:" in result.err + result.out and "Traceback" not in result.err


def test_without_a_command_there_is_the_help_and_status_0(command: Command) -> None:
    bare, asked = command(), command("--help")
    assert (bare.status, bare.err) == (0, "") and bare.out == asked.out and "Usage:" in bare.out


def test_a_port_in_use_is_one_line(command: Command, taken: str) -> None:
    result = command("server", "--listen", taken)
    assert result.status == 1
    assert result.err.count("\n") == 1 and result.err.startswith("error: ") and taken in result.err


def test_names_are_split_at_commas_outside_of_brackets() -> None:
    assert split_names("3lc[s=1.0,entropy=zstd],int8 , fp32,") == ("3lc[s=1.0,entropy=zstd]", "int8", "fp32")
    assert split_names("") == ()
    for text in ("3lc[s=1", "3lc]s=1[", "a[[[b]]]", "a[b,c"):
        with pytest.raises(ConfigError, match="its brackets do not match"):
            split_names(text)
