"""A data set by its name, its folder, and the way to get it. Nothing downloads by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from thinwire.errors import ConfigError, DataError, guess
from thinwire.names import parse_name
from thinwire_lab.workloads import images
from thinwire_lab.workloads.dataset import Dataset, part
from thinwire_lab.workloads.texts import PYTHON, QUOTATIONS, Text

SYSTEM_FOLDER = Path("/usr/share/datasets")
_in_use = WeakValueDictionary[tuple[str, Path, int | None], Dataset]()
"""Data sets in use, by name, folder and context: 64 workers in one process share one copy."""


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """One data set in the list of `datasets`: its folder (None if it is missing), and the way to get it."""

    name: str
    description: str
    where: Path | None
    how: str


class _Source(NamedTuple):
    """One data set: `present` finds it in a folder; `home` is its only folder; `text` has a context."""

    description: str
    how: str
    present: Callable[[Path], Any]
    load: Callable[..., Dataset]
    home: Callable[[], Path] | None = None
    text: bool = False


def _idx(name: str, description: str, or_else: str = "") -> _Source:
    how = f"thinwire inspect data --download {name}{or_else}"
    about = f"{description}, 28×28 grey pixels, 60,000 train and 10,000 test"
    return _Source(about, how, images.idx_files, partial(images.idx_dataset, name))


def _text(text: Text, description: str) -> _Source:
    about = f"{description}, 64 bytes of context, or what the recipe says"
    return _Source(about, text.how, text.present, text.load, text.home, True)


_SOURCES = {
    "digits": _Source(
        "handwritten digits, 8×8 grey pixels, 1,347 train and 450 test (UCI optdigits)",
        "part of thinwire-lab; if it is missing, reinstall",
        *(Path.is_file, lambda path: images.digits(), lambda: images.DIGITS),
    ),
    "fashion-mnist": _idx("fashion-mnist", "clothes of Zalando", ", or apt-get install dataset-fashion-mnist"),
    "mnist": _idx("mnist", "handwritten digits"),
    "cifar10": _Source(
        "small photographs, 32×32 colour pixels, 50,000 train and 10,000 test",
        "thinwire inspect data --download cifar10",
        *(images.cifar_files, images.cifar10),
    ),
    "python-text": _text(PYTHON, "source of this Python's standard library"),
    "quotations": _text(QUOTATIONS, "quotations in English"),
}


def cache_folder() -> Path:
    """Returns the default folder of downloads: .cache/thinwire in the user's home folder."""
    try:
        return Path.home() / ".cache" / "thinwire"
    except RuntimeError as error:
        raise DataError(
            "this user has no home folder for data sets: set HOME, or name a folder (root, --root)"
        ) from error


def data(name: str, *, root: Path | str | None = None, context: int | None = None) -> Dataset:
    """Returns a data set, loaded once; callers must not change its tensors.

    Options stand in brackets: `mnist[train=4000,test=1000]` has that many examples of each set, the same at every call;
    `unit=true` gives pixels from 0 to 1 in place of standardised ones; `cifar10[crop=24]` is the middle of each image,
    in training a random window. The files are in `root` or its subfolder `name`; without `root` in our cache or in
    /usr/share/datasets. `context` is the number of bytes in an example of text.
    """
    if "[" in name:
        whole, cut = parse_name(name, "data set")
        if unknown := cut.keys() - {"train", "test", "unit", "crop"}:
            raise ConfigError(
                f"{name}: unknown option {sorted(unknown)[0]!r}; a data set has train, test, unit and crop"
            )
        return part(data(whole, root=root, context=context), name=name, **cut)
    source, places = _source(name), _places(name, root)
    if context is not None and not source.text:
        raise ConfigError(f"{name} is no text: it has no context")
    cut = {} if context is None else {"context": context}
    for place in places:
        if source.present(place):
            key = name, place, context
            if (found := _in_use.get(key)) is None:
                _in_use[key] = found = source.load(place, **cut)
            return found
    raise DataError(f"the data set {name} is not in {' and '.join(map(str, places))}: {source.how}")


def datasets(*, root: Path | str | None = None) -> list[DataInfo]:
    """Returns every data set with its folder, without loading it."""
    return [
        DataInfo(name=name, description=each.description, where=_where(name, root), how=each.how)
        for name, each in _SOURCES.items()
    ]


def is_here(name: str) -> bool:
    """Returns whether `data(name)` would find it, without loading it."""
    return _where(name.partition("[")[0], None) is not None


def _where(name: str, root: Path | str | None) -> Path | None:
    source = _source(name)
    return next((place for place in _places(name, root) if source.present(place)), None)


def _source(name: str) -> _Source:
    if name not in _SOURCES:
        raise ConfigError(f"unknown data set {name!r}{guess(name, _SOURCES)}; the data sets are {', '.join(_SOURCES)}")
    return _SOURCES[name]


def _places(name: str, root: Path | str | None) -> list[Path]:
    if (home := _SOURCES[name].home) is not None:
        return [home()]
    if root is not None:
        return [Path(root) / name, Path(root)]
    try:
        return [cache_folder() / name, SYSTEM_FOLDER / name]
    except DataError:  # without a home folder there is no cache
        return [SYSTEM_FOLDER / name]
