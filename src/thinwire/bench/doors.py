"""Every way into thinwire as real processes: does it run, are replicas equal, do residuals survive, how many lines?

A door is a script of `examples/doors`, started as its users start it: by torchrun, or with Python where a framework
starts the ranks. Lines that thinwire needs end with `# thinwire`; without them the script is one of torch or of the
framework alone, and that is run, too. Each script saves what it has trained and goes on from it: two epochs in one run,
and one epoch, an end and one more epoch must give the same weights, bit for bit, on every rank. Uncompressed tensors
apart, that needs every rank's residual.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from thinwire.bench.harness import Bench, Figures, Measured, Tell
from thinwire.bench.options import DoorsOptions
from thinwire.engines.ending import end_all
from thinwire.engines.parent_watch import with_parent_watch
from thinwire.errors import ConfigError, EngineError
from thinwire.quantities import number_text

MARK = "# thinwire"
TASK = "task.py"
"""What all scripts import: the data and the model."""
PATIENCE_S = 600.0
_NEW_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""Else ranks that torchrun starts again may read addresses of ranks that are dead, in the store that they share."""
_SAID = re.compile(r"rank (\d+): (\d+) epochs, loss ([\d.]+), weights ([0-9a-f]{12})")


@dataclass(frozen=True, slots=True)
class Door:
    """A way into thinwire.

    Args:
        name: as its users call it.
        script: in the folder of examples.
        ranks: how many processes train.
        arguments: of the script.
        needs: modules without which the script cannot run.
        extra: of thinwire, which brings them.
        torchrun: whether torchrun starts the ranks; a framework does otherwise.
        elastic: whether a rank dies after the first epoch and torchrun starts all again, in place of two runs.
    """

    name: str
    script: str
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    extra: str = ""
    torchrun: bool = True
    elastic: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def missing(self) -> str:
        """The command that installs what is missing; empty where nothing is."""
        return "" if all(map(find_spec, self.needs)) else f"pip install '.[{self.extra}]' in a checkout of thinwire"


_COMPILED = ("--backend", "aot_eager")  # needs no C++ compiler
DOORS = (
    Door("DDP", "with_ddp.py"),
    Door("torchrun elastic", "with_ddp.py", elastic=True),
    Door("FSDP2", "with_fsdp2.py", ranks=4),
    Door("HSDP", "with_fsdp2.py", ranks=4, arguments=("--sites", "2")),
    Door("torch.compile of DDP", "with_compile.py", arguments=_COMPILED),
    Door("DDP of torch.compile", "with_compile.py", arguments=(*_COMPILED, "--inside")),
    Door("Accelerate", "with_accelerate.py", needs=("accelerate",), extra="huggingface"),
    Door("HF Trainer", "with_trainer.py", needs=("transformers", "accelerate"), extra="huggingface"),
    Door("PEFT", "with_peft.py", needs=("peft",), extra="huggingface"),
    Door("Lightning", "with_lightning.py", needs=("lightning",), extra="lightning"),
    Door("Lightning with FSDP2", "with_lightning_fsdp2.py", ranks=4, needs=("lightning",), extra="lightning"),
    Door(
        "Lightning with HSDP",
        "with_lightning_fsdp2.py",
        ranks=4,
        arguments=("--sites", "2"),
        needs=("lightning",),
        extra="lightning",
    ),
    Door("Ray Train", "with_ray.py", needs=("ray",), extra="ray", torchrun=False),
    Door("Ray engine", "with_ray_engine.py", needs=("ray",), extra="ray", torchrun=False),
)


@dataclass(frozen=True, slots=True)
class Ended:
    """What the ranks of a run said at its end: the loss, and the hash of each rank's weights."""

    loss: float
    weights: tuple[str, ...]


class DoorRun(Figures, frozen=True, kw_only=True):
    """What was found at a door.

    Attributes:
        missing: the command that installs what the script needs; then nothing else was found.
        error: why it does not run; empty where it does.
        replicas_equal: whether all ranks ended with the same weights, in every run.
        residuals_survive: whether stopping and going on changed no bit.
        changed_lines: lines that the script has for thinwire, imports included.
        loss: after two epochs.
        plain_loss: without thinwire's lines.
    """

    missing: str = ""
    error: str = ""
    replicas_equal: bool | None = None
    residuals_survive: bool | None = None
    changed_lines: int | None = None
    loss: float | None = None
    plain_loss: float | None = None


@dataclass(kw_only=True)
class DoorsBench(DoorsOptions, Bench[Door, DoorRun]):
    """All doors, or some.

    Args:
        doors: names; by default all.
        examples: the folder of their scripts.

    Raises:
        ConfigError: an unknown door, or no such scripts.
    """

    kinds = (DoorRun,)
    columns = (
        ("door", lambda door, runs: str(door)),
        ("runs", lambda door, runs: "not installed" if runs[0].missing else _yes(not runs[0].error)),
        ("replicas equal", lambda door, runs: _yes(runs[0].replicas_equal)),
        ("residuals survive save and load", lambda door, runs: _yes(runs[0].residuals_survive)),
        ("changed lines", lambda door, runs: number_text(runs[0].changed_lines)),
        ("test loss", lambda door, runs: number_text(runs[0].loss)),
        ("without thinwire", lambda door, runs: number_text(runs[0].plain_loss)),
    )

    def __post_init__(self) -> None:
        known = {door.name: door for door in DOORS}
        if unknown := [name for name in self.doors if name not in known]:
            raise ConfigError(f"no door is called {', '.join(unknown)}; there are {', '.join(known)}")
        needed = (TASK, *(door.script for door in self.cells()))
        if missing := next((name for name in needed if not (self.examples / name).is_file()), None):
            raise ConfigError(
                f"{self.examples} has no {missing}: the doors' scripts come with thinwire's repository: run this in a "
                "checkout of it, or say where they are with --examples"
            )

    def cells(self) -> list[Door]:
        return [door for door in DOORS if not self.doors or door.name in self.doors]

    def key(self, cell: Door, number: int) -> dict[str, Any]:
        """As of any benchmark, with the scripts' contents: in another folder, or tomorrow, they may be others."""
        sources = [(self.examples / name).read_bytes() for name in (TASK, cell.script)]
        return {**super().key(cell, number), "sha256": [hashlib.sha256(source).hexdigest() for source in sources]}

    def measure(self, cell: Door, before: Measured[Door, DoorRun], tell: Tell) -> DoorRun:
        if cell.missing:
            return DoorRun(missing=cell.missing)
        changed = marked(self.examples / cell.script)
        try:
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                tell("without thinwire")
                unmarked(self.examples, cell.script, folder / "plain")
                plain = train(cell, folder / "plain", folder / "a", 2)
                tell("in one run")
                through = train(cell, self.examples, folder / "b", 2)
                tell("stopped and gone on")
                halves = [] if cell.elastic else [train(cell, self.examples, folder / "c", 1)]
                again = train(cell, self.examples, folder / "c", 2, dies=cell.elastic)
        except EngineError as error:
            return DoorRun(error=str(error), changed_lines=changed)
        runs = [through, again, *halves]
        return DoorRun(
            replicas_equal=all(len(set(run.weights)) == 1 for run in runs),
            residuals_survive=again.weights == through.weights,
            changed_lines=changed,
            loss=through.loss,
            plain_loss=plain.loss,
        )

    def failed(self, figures: DoorRun) -> bool:
        return figures.error != "" or False in (figures.replicas_equal, figures.residuals_survive)

    def outdated(self, cell: Door, figures: DoorRun, before: Measured[Door, DoorRun]) -> bool:
        """What was not installed then may be now."""
        return self.failed(figures) or (figures.missing != "" and not cell.missing)

    def line(self, cell: Door, figures: DoorRun) -> str | None:
        return f"{cell}: {figures.error}" if figures.error else None

    def notes(self, measured: Measured[Door, DoorRun]) -> list[str]:
        return [f"{door}: {run.missing}" for door, [run, *_] in measured.items() if run.missing]


def marked(script: Path) -> int:
    """Returns how many lines a script has for thinwire."""
    return sum(line.endswith(MARK) for line in script.read_text().splitlines())


def unmarked(examples: Path, script: str, into: Path) -> None:
    """Writes a script without the lines that it has for thinwire, beside what it imports.

    Raises:
        EngineError: thinwire's name is left in it.
    """
    into.mkdir()
    shutil.copy(examples / TASK, into)
    lines = [line for line in (examples / script).read_text().splitlines() if not line.endswith(MARK)]
    if left := [line for line in lines if "thinwire" in line]:
        raise EngineError(f"{script} has a line of thinwire's without the mark {MARK!r}: {left[0].strip()}")
    (into / script).write_text("\n".join(lines) + "\n")


def train(door: Door, scripts: Path, folder: Path, epochs: int, *, dies: bool = False) -> Ended:
    """Runs a door's script to its end.

    Args:
        door: which.
        scripts: the folder of its script.
        folder: where its checkpoints are, or will be.
        epochs: how far it trains.
        dies: whether the last rank dies after the first epoch, and torchrun starts all of them again.

    Raises:
        EngineError: it failed, took too long, or not every rank came to the end; the message has its last lines.
    """
    script = [str(scripts / door.script), "--folder", str(folder), "--epochs", str(epochs), *door.arguments]
    command = [sys.executable]
    if door.torchrun:
        ranks = ["--standalone", "--nproc-per-node", str(door.ranks)]
        command += ["-m", "torch.distributed.run", *ranks]
        if dies:
            command = ["env", _NEW_STORE, *command, "--max-restarts", "1"]
    text = _output([*command, *script, *(["--die-after", "1"] if dies else [])])
    said = {
        int(rank): (float(loss), weights) for rank, count, loss, weights in _SAID.findall(text) if int(count) == epochs
    }
    if set(said) != set(range(door.ranks)):
        raise EngineError(f"{door.script}: {sorted(said)} of {door.ranks} ranks came to the end: {_end(text)}")
    return Ended(said[0][0], tuple(said[rank][1] for rank in range(door.ranks)))


def _output(command: Sequence[str]) -> str:
    """Returns what a command and all that it started print."""
    with subprocess.Popen(
        with_parent_watch(list(command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"{command[-1]} has not ended within {PATIENCE_S:g} s") from error
        finally:
            end_all(process)
    if process.returncode != 0:
        raise EngineError(f"exit status {process.returncode}: {_end(text)}")
    return text


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-25:])


def _yes(value: bool | None) -> str:
    return "–" if value is None else "yes" if value else "NO"
