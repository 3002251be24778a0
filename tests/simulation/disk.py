"""A disk that can lose what was not forced to it: torn files, and renames that did not last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tests.simulation.scheduler import Host
from thinwire.runtime.disk import Bytes

if TYPE_CHECKING:
    from tests.simulation.processes import Processes

T = TypeVar("T")
WRITE_S = 0.01


@dataclass(eq=False)
class File:
    """Contents, and how much of them is on the disk for certain."""

    data: bytes = b""
    forced: int = 0
    writer: Host | None = None


class SimulatedDisk:
    """One process's disk, a `Disk` whose contents outlive the process."""

    def __init__(self, cluster: Processes, owner: str) -> None:
        self.host: Host | None = None
        self.write_s = WRITE_S
        """How long a write takes."""
        self._cluster = cluster
        self._is_server, self._number = owner.startswith("server"), int(owner.split()[1])
        self._names: dict[str, File] = {}
        self._lasting: dict[str, File] = {}
        self._changes: list[dict[str, File]] = []
        """The names after each change since the last `sync`."""

    def crash(self) -> None:
        """The machine loses power: of what was not forced, some lasts and some does not."""
        chance = self._cluster.chance
        kept = [self._lasting, *self._changes][: chance.randint(0, len(self._changes)) + 1]
        self._names = dict(kept[-1])
        for file in self._names.values():
            file.data = file.data[: max(file.forced, chance.randint(0, len(file.data)))]
            file.writer = None
        self._lasting, self._changes = dict(self._names), []

    # ---- `Disk`

    @contextmanager
    def write(self, path: Path, parts: Iterable[Bytes]) -> Iterator[None]:
        file = File(writer=self.host)
        self._names[path.name] = file
        self._changed()
        for part in parts:
            file.data += bytes(part)
        self._reached("checkpoint.write")
        file.forced = len(file.data)
        self._reached("checkpoint.forced")
        try:
            yield
        finally:
            file.writer = None

    def rename(self, old: Path, new: Path) -> None:
        self._reached("checkpoint.rename")
        self._names[new.name] = self._names.pop(old.name)
        self._changed()

    def sync(self, folder: Path) -> None:
        self._reached("checkpoint.sync")
        self._lasting, self._changes = dict(self._names), []

    def remove(self, path: Path) -> None:
        self._names.pop(path.name, None)
        self._changed()

    def names(self, folder: Path) -> list[str]:
        return list(self._names)

    def abandoned(self, path: Path) -> bool:
        file = self._names.get(path.name)
        return file is not None and (file.writer is None or not file.writer.alive)

    def read(self, path: Path, start: int = 0, nbytes: int = -1) -> bytes:
        if path.name not in self._names:
            raise FileNotFoundError(path)
        data = self._names[path.name].data[start:]
        return data if nbytes < 0 else data[:nbytes]

    # ---- its thread

    def executor(self) -> Executor:
        assert self.host is not None
        return _Later(self, self.host)

    def _changed(self) -> None:
        self._changes.append(dict(self._names))

    def _reached(self, point: str) -> None:
        if self._is_server:
            self._cluster.reached_at_server(point, self._number)


class _Write(Future[T]):
    """A write that is done at its time, or as soon as its result is asked for."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        self._call: Callable[[], T] | None = call

    def run(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            try:
                self.set_result(call())
            except Exception as error:
                self.set_exception(error)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(timeout)


class _Later(Executor):
    def __init__(self, disk: SimulatedDisk, host: Host) -> None:
        self._disk, self._host = disk, host

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        write: _Write[T] = _Write(lambda: fn(*args, **kwargs))
        self._host.call_later(self._disk.write_s, write.run)
        return write
