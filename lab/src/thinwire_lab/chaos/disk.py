"""A disk of one megabyte or so that can be full: a tmpfs in a mount namespace, which is gone with its holder."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

from thinwire.engines.parent_watch import with_parent_watch
from thinwire.errors import EngineError
from thinwire_lab.engines.system_tools import find_tools

_HOLDER_SCRIPT = 'mount -t tmpfs -o "size=$2" thinwire-chaos "$1" && echo mounted && exec cat'


class TinyDisk:
    """A small disk at a folder, for the processes that are started inside it."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        tools = find_tools()
        command = [tools["unshare"], "--mount", "--propagation", "private", "--", "sh", "-c", _HOLDER_SCRIPT]
        self._holder = subprocess.Popen(
            with_parent_watch([*command, "sh", str(folder), str(nbytes)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise EngineError(f"cannot mount a small disk: {self._holder.communicate()[1].strip()}")
        self._filler = Path(f"/proc/{self._holder.pid}/root{folder}") / "filler"

    @property
    def namespace(self) -> str:
        """The file of the namespace in which the folder is this disk."""
        return f"/proc/{self._holder.pid}/ns/mnt"

    def fill(self) -> None:
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def clear(self) -> None:
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()
