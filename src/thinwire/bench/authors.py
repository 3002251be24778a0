"""Optimizers of other people, raced as their authors wrote them: where each is to be had, and how it is loaded.

None of their code is in this project. A file is given by its path and imported as it is; its name and SHA-256 stand
beside the figures, so that a reader knows what ran. What calls these classes is `bench.methods`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.policies.naming import check_count


@dataclass(frozen=True, kw_only=True)
class Work:
    """One optimizer of other people.

    Args:
        about: what its hook does.
        where: the file, and the repository that has it; or the package.
        file: what its file is called in `--authors NAME=PATH`; None for an installed package.
        optimizer: the class in the file.
        options: of the hook, with their defaults.
    """

    about: str
    where: str
    file: str | None = None
    optimizer: str = ""
    options: Mapping[str, float]


WORKS: dict[str, Work] = {
    "demo-authors": Work(
        about="DeMo's optimizer, every step",
        where="demo.py of github.com/bloc97/DeMo",
        file="demo",
        optimizer="DeMo",
        options={"k": 32, "error_scale": 0.999},
    ),
    "sparseloco-authors": Work(
        about="AdamW for h steps, then a step of SparseLoCo's optimizer",
        where="src/tplr/sparseloco.py of github.com/tplr-ai/SparseLoCo",
        file="sparseloco",
        optimizer="SparseLoCo",
        options={"h": 30, "outer_lr": 0.65, "k": 64, "bits": 2, "error_scale": 0.95},
    ),
    "diloco-torchft": Work(
        about="torchft's DiLoCo around AdamW, uncompressed",
        where="torchft",
        options={"h": 30, "fragments": 1, "delay": 0, "keep": 0.0, "outer_lr": 0.7, "outer_momentum": 0.9},
    ),
}
"""By the name of the hook. Options are called as those of our designs, and have the same defaults where these do."""


def chosen(name: str, options: Mapping[str, Any]) -> dict[str, float]:
    """Returns all options of a work's hook, from those that were given.

    Raises:
        ConfigError: one that it does not have, or that is no number of its kind.

    Example:
        >>> chosen("demo-authors", {"k": 16})
        {'k': 16, 'error_scale': 0.999}
    """
    known = WORKS[name].options
    for key, value in options.items():
        if key not in known:
            raise ConfigError(f"hook {name!r} has no option {key!r}; it has {', '.join(known)}")
        if isinstance(known[key], int):
            check_count(key, value, 0 if key == "delay" else 1)
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"hook {name!r}: {key}={value!r}; it is a number of at least 0")
    return {**known, **options}


def files(given: Sequence[str]) -> dict[str, Path]:
    """Returns the authors' files by what they are called, from `NAME=PATH`.

    Raises:
        ConfigError: not of that form, an unknown name, or no file is there.
    """
    known = {work.file: work for work in WORKS.values() if work.file is not None}
    found: dict[str, Path] = {}
    for each in given:
        name, equals, path = each.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"--authors {each!r}; expected NAME=PATH with a name of {', '.join(known)}")
        if not Path(path).is_file():
            raise ConfigError(f"--authors {each!r}: there is no such file; it is to be {known[name].where}")
        found[name] = Path(path).resolve()
    return found


def identify(name: str, given: Mapping[str, Path]) -> str | None:
    """Returns what ran, for the results: a file's name and SHA-256, a package's version; None for hooks of ours.

    Args:
        name: a hook's id.
        given: as `files` returned them.

    Raises:
        ConfigError: a file or package that the hook needs is missing.
    """
    work = WORKS.get(name)
    if work is None:
        return None
    if work.file is None:
        if find_spec(work.where) is None:
            raise ConfigError(f"hook {name!r} needs the package {work.where}: pip install {work.where}")
        return f"{work.where} {version(work.where)}"
    path = given.get(work.file)
    if path is None:
        raise ConfigError(
            f"hook {name!r} runs its authors' own file, which is not part of thinwire: get {work.where}, and give it "
            f"to `thinwire bench race` of language models with --authors {work.file}=PATH"
        )
    return f"{path.name}, SHA-256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def load(name: str, path: Path) -> Any:
    """Returns the optimizer's class from its authors' file, imported as it is.

    Raises:
        ConfigError: the file cannot be imported, or has no such class.
    """
    work = WORKS[name]
    spec = spec_from_file_location(f"{work.file}_authors", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file; {name!r} needs {work.where}")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{path} imports {error.name}, which is not installed: pip install {error.name}") from error
    except Exception as error:  # whatever a file of other people does when it is imported
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, work.optimizer):
        raise ConfigError(f"{path} has no class {work.optimizer}; {name!r} needs {work.where}")
    return getattr(module, work.optimizer)
