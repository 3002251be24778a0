"""Golden files: one archive for each list of frames or packets. Members are stored, sorted and undated."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile, ZipInfo


def read(archive: Path) -> dict[str, bytes]:
    """Returns the members by name; none where there is no archive yet."""
    if not archive.exists():
        return {}
    with ZipFile(archive) as members:
        return {name: members.read(name) for name in members.namelist()}


def write(archive: Path, members: dict[str, bytes]) -> None:
    """Writes the archive. Equal members give equal bytes."""
    with ZipFile(archive, "w") as out:
        for name, data in sorted(members.items()):
            out.writestr(ZipInfo(name), data)
