"""Help with examples, and errors in one line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import thinwire as tw
from tests.cli.commands import Result
from tests.server.conversation import Shard
from thinwire.cli import main
from thinwire.runtime import checkpoint

Command = Callable[..., Result]
GROUPS = {
    "bench": {
        *("codecs", "transports", "hooks", "race", "server", "designs"),
        *("hostile", "clock", "fsdp", "doors", "pays", "updates", "memory"),
    },
    "chaos": {"worker-death", "backup-death", "server-death", "storm", "storms", "soak"},
}
COMMANDS = {
    "demo",
    "plan",
    "train",
    "compare",
    "server",
    "worker",
    "designs",
    "codecs",
    "inspect",
    "certs",
    "reproduce",
    "watch",
    "report",
}


def visible(group: Any) -> dict[str, Any]:
    return {name: command for name, command in group.commands.items() if not command.hidden}


def test_the_version(command: Command) -> None:
    result = command("--version")
    assert (result.status, result.out) == (0, f"thinwire {tw.__version__}\n")


def test_every_command_is_listed_and_its_help_has_an_example(command: Command) -> None:
    root = visible(typer.main.get_command(main.app))
    assert set(root) == COMMANDS | GROUPS.keys()
    for group in (None, *GROUPS):
        names = COMMANDS | GROUPS.keys() if group is None else GROUPS[group]
        assert group is None or set(visible(root[group])) == names
        result = command(*[group] if group else [], "--help")
        listed = set(re.findall(r"^\W*([\w-]+) {2,}\S", result.out.partition("Commands")[2], re.MULTILINE))
        assert result.status == 0 and listed == names
    for words in [*([name] for name in COMMANDS), *([group, name] for group in GROUPS for name in GROUPS[group])]:
        listed_as = (root if len(words) == 1 else visible(root[words[0]]))[words[-1]]
        loaded = listed_as.load()
        assert listed_as.help == loaded.help.partition("\n\n")[0].replace("\n", " "), words
        assert (listed_as.hidden, listed_as.deprecated) == (loaded.hidden, loaded.deprecated), words
        result = command(*words, "--help")
        assert result.status == 0
        registered = sys.modules[listed_as.module].app.registered_commands
        written = {each.callback.__name__: str(each.epilog).split() for each in registered}[loaded.callback.__name__]
        assert " ".join(written) in " ".join(result.out.split()), "designs in an example keep their brackets"
        for parameter in loaded.params:
            words_of = set(re.findall(r"\w+\\?\[\S*\]", getattr(parameter, "help", None) or ""))
            assert all(each.replace("\\[", "[") in result.out for each in words_of), (words, words_of)
        assert re.search(rf"Examples?\b.*thinwire {' '.join(words)}", result.out), words
        assert "--json" in result.out or words == ["server"]


def test_help_and_misspelt_options_import_neither_torch_nor_what_a_command_computes_with() -> None:
    """In an interpreter that refuses them, as one that lacks them would: import torch alone takes seconds."""
    asked = [
        *(f"{name} --help" for name in sorted(COMMANDS)),
        *("--help", "--version", "bench --help", "chaos --help", "", "trian", "bench hoks"),
        *(f"{group} {name} --help" for group in GROUPS for name in GROUPS[group]),
        *(f"{name} --no-such-option" for name in sorted(COMMANDS)),
        *("bench hooks --no-such-option", "bench clock --workers many", "chaos storms --runs 0"),
        *("train --steps 0", "train --steps many", "compare --workers", "worker", "certs"),
    ]
    code = f"""
import contextlib, io, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numba", "numpy", "grpc", "matplotlib", "plotly", "cryptography"):
            raise AssertionError(f"{{sys.argv}} imports {{name}}")

sys.meta_path.insert(0, Refused())
from thinwire.cli.main import run
for line in {asked!r}:
    sys.argv = ["thinwire", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            run()
        except SystemExit as end:
            assert end.code == (0 if "--help" in line or "--version" in line else 2), (line, end.code, said.getvalue())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_where_a_sign_cannot_be_shown_the_rest_is() -> None:
    """As in a container whose locale is none."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "from thinwire.cli.main import run; run()"
    asked = [sys.executable, "-c", code, "codecs"]
    done = subprocess.run(asked, capture_output=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"3lc" in done.stdout and b"?" in done.stdout and done.stdout.isascii()


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield f"127.0.0.1:{other.getsockname()[1]}"


MISUSE: list[tuple[list[str], str]] = [
    (["train", "--design", "4lc"], r"unknown design '4lc' \(did you mean '3lc'\?\); there are fp32, .*"),
    (["train", "--design", "3lc[s=2]"], r".*3lc: sparsity=2; it must lie in \[1, 2\).*"),
    (["train", "--design", "3lc[sparsty=1.5]"], r".*3lc: unknown option 'sparsty' \(did you mean 'sparsity'\?\).*"),
    (["train", "--model", "lenet6"], r".*'lenet6'.*mlp.*"),
    (["train", "--data", "imagenet"], r".*'imagenet'.*digits.*"),
    (["train", "--steps", "5", "--seconds", "5"], r"a run has a number of steps or a time budget, not both"),
    (["train", "--seconds", "0"], r"0.0 seconds; a time budget is positive and finite"),
    (["train", "--lr", "-1"], r"the learning rate is -1.0; expected a positive number"),
    (["train", "--telemetry", "/dev/null/steps.jsonl"], r"step records cannot be written to '/dev/null/steps.jsonl'.*"),
    (["train", "--link", "10mb"], r".*10mb.*10mbit.*"),
    (["train", "--shaping", "tc", "--link", "1mbit"], r"shaping 'tc'; allowed are auto, kernel and application"),
    (["demo", "--seconds", "inf"], r"inf seconds; a time budget is positive and finite"),
    (["watch", "127.0.0.1:9464"], r".*there is no such file; an endpoint is named .*, as in http://127.0.0.1:9464"),
    (["demo", "--link", "fast"], r".*fast.*10mbit.*"),
    (["server", "--shape", "10"], r".*10.*10mbit.*"),
    (["server", "--listen", "nowhere"], r".*nowhere.*"),
    (
        ["server", "--listen", "0.0.0.0:0"],
        r"listening on 0.0.0.0 without a certificate and a token file .*--insecure.*",
    ),
    (["server", "--tls-cert", __file__], r"a certificate needs its key and a key its certificate.*"),
    (["bench", "transports", "--security", "ssl"], r"security ssl; allowed are none and tls"),
    (["server", "--resume"], r"--resume goes on from a checkpoint: say which with --checkpoint FILE"),
    (["server", "--resume", "--checkpoint", "no-such"], r"there is no checkpoint 'no-such' to resume from"),
    (["server", "--resume-if-there"], r"--resume-if-there goes on from a checkpoint: say which with --checkpoint FILE"),
    (
        ["server", "--no-rejoin", "--worker-grace-s", "5"],
        r"--worker-grace-s 5 is for workers that come again: leave --no-rejoin out",
    ),
    (
        ["worker", "--server", "grpc://127.0.0.1:1", "--events", "--json", "-"],
        r"--events and --json - both write to standard output: give --json a file",
    ),
    (["server", "--checkpoint", "no/such"], r"checkpoint 'no/such' cannot be written: .*Choose another place"),
    (["train", "--resume"], r"--resume goes on from checkpoints: say where they are with --checkpoint-dir DIR"),
    (
        ["train", "--checkpoint-every", "5"],
        r"--checkpoint-every writes checkpoints: say where with --checkpoint-dir DIR",
    ),
    (["server", "--checkpoint-every", "5"], r"--checkpoint-every writes checkpoints: say where with --checkpoint FILE"),
    (["train", "--address", "auto"], r"--address auto is of a Ray cluster: add --engine ray"),
    (
        ["train", "--model", "byte-transformer-1m", "--data", "python-text", "--momentum", "0.9"],
        r"momentum 0\.9 is of SGD; byte-transformer-1m trains with AdamW",
    ),
    (
        ["bench", "race", "--models", "lenet", "--rates", "1e-3"],
        r"--rates: of a race to a loss, whose models read text.*",
    ),
    (
        ["bench", "race", "--models", "byte-transformer-1m", "--target-accuracy", "0.5"],
        r"--target-accuracy: of a race to an accuracy, whose models read images.*",
    ),
    # Whoever gives what would be taken anyway means it all the same.
    (
        ["bench", "race", "--models", "byte-transformer-1m", "--target-accuracy", "0.8"],
        r"--target-accuracy: of a race to an accuracy, whose models read images.*",
    ),
    (
        ["bench", "race", "--models", "lenet", "--margin", "0.1"],
        r"--margin: of a race to a loss, whose models read text.*",
    ),
    (["bench", "race", "--models", "byte-transformer", "--data", "fashion-mnist"], r".*trains on python-text"),
    (
        ["bench", "race", "--models", "byte-transformer-1m", "--rates", "1e-3", "--lr", "2e-3"],
        r"--lr is one rate and --rates a grid: give one of them",
    ),
    (["bench", "pays", "--models", "mlp,lenet6"], r"unknown model 'lenet6'.*"),
    (["worker", "--server", "127.0.0.1:7070"], r"server='127.0.0.1:7070'; expected grpc://host:port"),
    (["worker", "--server", "grpc://127.0.0.1:1", "--rank", "9"], r".*rank=?.?9.*4.*|.*127.0.0.1:1.*"),
    (["bench", "hooks", "--hook", "zip"], r"unknown hook 'zip'; .*"),
    (["bench", "server", "--steps", "5"], r"5 steps; more than 5 are needed, which are not counted"),
    (["bench", "transports", "--link", "10mb", "--resume"], r"--resume goes on from a file of results: .*"),
    (["inspect", "no-such-file"], r"no-such-file: No such file or directory. Give codecs, models, data, .*"),
]


def test_misuse_is_one_line_and_status_2(command: Command) -> None:
    for arguments, text in MISUSE:
        more = ["--connect-timeout", "0.2"] if arguments[0] == "worker" else []
        result = command(*arguments, *more)
        assert result.err.count("\n") == 1 and "Traceback" not in result.err, arguments
        assert re.fullmatch(f"error: (?:{text})\n", result.err), result.err
        assert result.status == 2 or "--rank" in arguments, arguments


def test_metrics_that_nobody_would_reach_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire_lab.cli.train.with_privileges", lambda link, shaping: None)
    monkeypatch.setattr("thinwire_lab.jobs.cluster.available", lambda: (True, ""))
    result = command("train", "--link", "1mbit", "--metrics-port", 9464)
    assert result.status == 2 and "add --shaping application, or take --telemetry FILE in its place" in result.err


def test_a_role_resumes_where_any_of_its_files_is_there(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "file"
    arguments = ("server", "--resume-if-there", "--checkpoint", file, "--listen", "nowhere")
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
    assert "'nowhere' is no address" in command(*arguments, "--resume-step", 1).err, "warnings are errors here"


def test_usage_is_explained_with_status_2(command: Command) -> None:
    for words in ("train --steps 0", "train --workers 0", "train --stpes 5", "trian", "worker", ""):
        result = command(*words.split())
        assert result.status == 2, words
        assert "Usage:" in result.err + result.out and "Traceback" not in result.err


def test_a_port_in_use_is_one_line(command: Command, taken: str) -> None:
    result = command("server", "--listen", taken)
    assert result.status == 1
    assert result.err.count("\n") == 1 and result.err.startswith("error: ") and taken in result.err


def test_no_server_is_one_line_with_the_address(command: Command, taken: str) -> None:
    result = command("worker", "--server", f"grpc://{taken}", "--connect-timeout", "0.3", "--workers", "1")
    assert result.status == 1
    assert result.err.count("\n") == 1 and result.err.startswith("error: ") and taken in result.err


def test_a_worker_that_waits_for_its_server_says_so(
    command: Command, taken: str, caplog: pytest.LogCaptureFixture
) -> None:
    result = command("worker", "--server", f"grpc://{taken}", "--connect-timeout", "1.2", "--workers", "1")
    assert result.status == 1 and "no server answered" in result.err
    assert caplog.messages == [f"no server at {taken} yet: this worker waits for it, 1.2 s at most"]


def test_data_that_is_missing_says_what_to_do(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["--server", "grpc://127.0.0.1:1", "--model", "resnet8", "--data", "cifar10", "--workers", "1"]
    result = command("worker", *arguments, "--data-root", tmp_path / "empty", "--connect-timeout", "0.2")
    assert result.status == 1
    assert result.err.startswith("error: ") and "cifar10" in result.err and "Traceback" not in result.err
    assert str(tmp_path / "empty") in result.err or "thinwire inspect data --download cifar10" in result.err


def test_a_bad_address_is_told_before_data_are_read(command: Command, tmp_path: Path) -> None:
    """Reading them, and compiling kernels, took the error nine seconds of processor time."""
    for address, text in {"nowhere": "expected grpc://host:port", "grpc://nowhere": "'nowhere' is no address"}.items():
        result = command(
            "worker", "--server", address, "--model", "resnet8", "--data", "cifar10", "--data-root", tmp_path
        )
        assert result.status == 2 and text in result.err


def test_data_that_is_missing_or_has_no_such_part_is_told_before_processes_start(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: object, **__: object) -> None:
        pytest.fail("processes were to be started")

    monkeypatch.setattr("thinwire_lab.jobs.processes.run_cluster", started)
    monkeypatch.setattr("thinwire_lab.bench.hook_runs._Run", started)
    missing = ["--model", "resnet8", "--data", "cifar10", "--data-root", tmp_path]
    hooks = ["bench", "hooks", "--data", "cifar10", "--data-root", tmp_path, "--links", "none", "--hook", "none"]
    for arguments, status, text in (
        (["train", *missing], 1, "the data set cifar10 is not in .*: thinwire inspect data --download cifar10"),
        (["train", "--data", "digits[train=0]"], 2, r"digits\[train=0\]: 0 examples of 1347; .* from 1 to 1347"),
        (["train", "--data", "digits[tran=5]"], 2, r".*unknown option 'tran'; .* train, test, unit and crop"),
        (["demo", "--data", "digits[test=9000]", "--link", "none"], 2, ".*9000 examples of 450; .*"),
        ([*hooks, "--models", "resnet8", "--png", tmp_path / "x.png"], 1, "the data set cifar10 is not in .*"),
    ):
        result = command(*arguments)
        assert result.status == status and re.fullmatch(f"error: {text}\n", result.err), (arguments, result)


def test_a_json_file_that_cannot_be_written(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = command("inspect", "models", "--json", tmp_path / "file" / "out.json")
    assert result.status == 2
    assert result.err.startswith("error: ") and "out.json cannot be written" in result.err
    result = command("inspect", "models", "--json", tmp_path)
    assert result.status == 2 and "is a directory" in result.err
