"""A watched command is the command: same process, streams and status, and it ends with its launcher."""

from __future__ import annotations

import signal
import subprocess
import sys

from thinwire.engines.parent_watch import with_parent_watch


def test_the_command_keeps_its_process_streams_and_status() -> None:
    with subprocess.Popen(
        with_parent_watch(["sh", "-c", "echo $$; cat; exit 7"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        output, _ = child.communicate("through\n")
    assert output.split() == [str(child.pid), "through"]
    assert child.returncode == 7


def test_signals_that_python_ignores_work_again() -> None:
    ignored = subprocess.run(with_parent_watch(["grep", "SigIgn", "/proc/self/status"]), capture_output=True, text=True)
    mask = int(ignored.stdout.split()[1], 16)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # a shell may have others ignored, and they are inherited
        assert not mask >> (signum - 1) & 1


def test_a_command_that_is_not_there_is_named() -> None:
    done = subprocess.run(with_parent_watch(["/nowhere/at-all"]), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "cannot start /nowhere/at-all: No such file or directory\n"


def test_it_does_not_start_what_has_already_lost_its_launcher() -> None:
    command = with_parent_watch(["echo", "started"])
    command[command.index("echo") - 1] = "1"  # the launcher that it looks for is not the one that it has
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-9, "")


def test_it_ends_when_its_launcher_is_killed() -> None:
    launcher = (
        "import subprocess, sys, time\n"
        "from thinwire.engines.parent_watch import with_parent_watch\n"
        "subprocess.Popen(with_parent_watch(['sh', '-c', 'echo up; exec sleep 600']))\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
        # The child holds the other end of this pipe: the pipe ends when the child does.
        assert process.stdout.read() == ""
