"""DDP hooks side by side: the grid of models, links, seeds and hooks, and how one run of one hook is measured.

Ranks join and warm up over unlimited links (uncompressed steps of a large model take half a minute at 10 Mbit/s, and
PowerSGD begins with two), then the links become thin and the clock starts. Bytes are what the kernel counted at each
rank's link. The figures are a rank's median step, its CPU time beside that of the same steps without any exchange,
and the curve of test accuracy over seconds of training, evaluations left out.

What a run reports on its way is enough for its figures: one that is cut short, or fails, keeps its curve.
"""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import UNSET, UnsetType

from thinwire.bench.authors import identify
from thinwire.bench.charts import draw_step_times
from thinwire.bench.harness import Bench, Figures, Measured, Tell, median
from thinwire.bench.hook_cells import NOTES, OURS, STOCK, Cell, hook
from thinwire.bench.hook_rank import SILENCE_S, Ended, HookRank, Scored, Stepped, Stopped, Warm
from thinwire.engines.events import Event
from thinwire.engines.links import Rate
from thinwire.engines.local import LocalEngine
from thinwire.engines.namespaces import Fabric, available
from thinwire.errors import ConfigError, EngineError, ThinwireError
from thinwire.jobs.cluster import Links, choose_links
from thinwire.jobs.outcome import CurvePoint
from thinwire.jobs.tables import Table, nbytes_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Picture

PORT = 29400
RankCommand = Callable[[HookRank], list[str]]


class HookRun(Figures, frozen=True, kw_only=True):
    """What one run came to; None where it was not measured, or the run did not get there.

    Attributes:
        seconds_per_step: median over rank 0's steps.
        cpu_seconds_alone: of the same step without any exchange.
        compute_share: of the steps' time, 0 … 1, what exchanges left for computing; of local updates alone.
        sent_bytes_per_step: mean over ranks, as the kernel counted them.
        seconds: of training, evaluations left out.
        ended: `steps`, `target` (reached), `limit` (cut short) or `error`.
        test_loss: at the end, in nats a byte, of text.
        lr: the largest learning rate, where it was chosen from a grid.
        report: what `ddp.report` says of a hook of ours.
    """

    seconds_per_step: float | None = None
    seconds_per_step_mean: float | None = None
    cpu_seconds_per_step: float | None = None
    cpu_seconds_alone: float | None = None
    compute_share: float | None = None
    sent_bytes_per_step: float | None = None
    received_bytes_per_step: float | None = None
    curve: list[CurvePoint]
    seconds_to_target: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    lr: float | None = None
    steps_done: int
    seconds: float
    ended: str
    shaping: str = ""
    report: str = ""
    error: str | None = None


def rank_command(role: HookRank) -> list[str]:
    """Returns the command of a rank's process."""
    return [sys.executable, "-m", "thinwire", *role.command(), "--events"]


def measure(
    cell: Cell,
    *,
    limit_s: float | None = None,
    tell: Tell = lambda text: None,
    command: RankCommand = rank_command,
    counted: bool = False,
    authors: Path | None = None,
) -> HookRun:
    """Measures one run. One that fails keeps what it got to, and `error` says how.

    Args:
        cell: what to run.
        limit_s: end the run once it has trained for so many seconds; None lets it go on.
        tell: takes words on progress.
        command: of a rank's process.
        counted: have the kernel make links, and count their bytes, without a limit too, where it may.
        authors: the file of other people's optimizer.
    """
    run = _Run(cell, tell, authors)
    try:
        kernel = cell.link is not None or (counted and available()[0])
        links = choose_links(cell.link, "kernel" if kernel else "auto")
        run.play(links, limit_s, command)
        return run.figures(links)
    except ThinwireError as error:
        return HookRun(
            curve=run.curve,
            steps_done=len(run.elapsed),
            seconds=max(run.elapsed, default=0.0),
            ended="error",
            error=f"{type(error).__name__}: {error}",
        )


class _Run:
    """What the ranks of one run have reported so far, and the bytes counted at the clock's start and end."""

    def __init__(self, cell: Cell, tell: Tell, authors: Path | None) -> None:
        self.cell, self.tell = cell, tell
        self._authors = None if authors is None else str(authors)
        self.fabric: Fabric | None = None
        self.names = [f"rank {rank}" for rank in range(cell.ranks)]
        self.elapsed: list[float] = []
        self.curve: list[CurvePoint] = []
        self.ended: list[Ended] = []
        self.counts: list[tuple[int, int]] = []

    def play(self, links: Links, limit_s: float | None, command: RankCommand) -> None:
        """Starts the ranks, opens their gates, and collects what they report until they end or the limit is over."""
        names = self.names
        kinds: list[type[Event]] = [Warm, Stepped, Scored, Stopped, Ended]
        with ExitStack() as stack:
            gate = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fabric = None
            if links.shaping == "kernel":
                fabric = self.fabric = stack.enter_context(Fabric(dict.fromkeys(names, Rate(None))))
            host = fabric.addresses[names[0]] if fabric else "127.0.0.1"
            master = f"{host}:{PORT if fabric else _free_port()}"
            # By the rendezvous ranks find the address that others reach their shards by.
            environment = {"GLOO_SOCKET_IFNAME": "eth0" if fabric else "lo", "MASTER_ADDR": host}
            engine = stack.enter_context(LocalEngine(kinds, fabric=fabric, environment=environment))
            for rank, name in enumerate(names):
                role = HookRank(cell=self.cell, rank=rank, master=master, gate=str(gate), authors=self._authors)
                engine.start(name, command(role), host=name if fabric else None)

            waiting = 0
            for _, event in engine.events(silence_s=SILENCE_S):
                self._take(event)
                if limit_s is not None and self.elapsed and self.elapsed[-1] > limit_s and len(self.counts) < 2:
                    self._count()
                    return
                waiting += isinstance(event, (Warm, Stopped))
                if waiting == self.cell.ranks:
                    waiting = 0
                    if fabric is not None and isinstance(event, Warm):
                        for name in names:
                            fabric.set_rate(name, links.rate)
                    self._count()
                    (gate / ("warm" if isinstance(event, Warm) else "stopped")).touch()

    def _count(self) -> None:
        if self.fabric is not None:
            ways = (self.fabric.sent, self.fabric.received)
            sent, received = (sum(way(name).nbytes for name in self.names) for way in ways)
            self.counts.append((sent, received))

    def _sent_so_far(self) -> float | UnsetType:
        """Bytes that left a rank since the clock started, mean over the ranks."""
        if self.fabric is None or not self.counts:
            return UNSET
        return (sum(self.fabric.sent(name).nbytes for name in self.names) - self.counts[0][0]) / len(self.names)

    def _take(self, event: Event) -> None:
        match event:
            case Stepped(step=step, seconds=seconds):
                self.elapsed.append(seconds)
                score = f", {self.curve[-1].text()}" if self.curve else ""
                self.tell(f"step {step} of {self.cell.steps}, {seconds:.1f} s of training{score}")
            case Scored(step=step, seconds=seconds, accuracy=accuracy, loss=loss):
                sent = UNSET if loss is UNSET else self._sent_so_far()
                point = CurvePoint(step=step, seconds=seconds, accuracy=accuracy, loss=loss, sent_bytes=sent)
                self.curve.append(point)
            case Ended():
                self.ended.append(event)

    def figures(self, links: Links) -> HookRun:
        """Returns what the run came to.

        Raises:
            EngineError: the ranks ended with different models.
        """
        cell, elapsed, curve, counts, ended = self.cell, self.elapsed, self.curve, self.counts, self.ended
        if len({each.weights for each in ended}) > 1:
            raise EngineError(f"{cell.hook}: the ranks ended with different models; no hook here allows that")
        seconds = [after - before for before, after in zip([0.0, *elapsed], elapsed, strict=False)]
        share = 1 / (len(elapsed) * cell.ranks)
        sent = received = None
        if len(counts) == 2:
            sent, received = (share * (after - before) for before, after in zip(*counts, strict=True))
        target = next((point for point in curve if cell.target is not None and point.accuracy >= cell.target), None)
        whole = len(ended) == cell.ranks
        spent = [each.exchange_seconds for each in ended if each.exchange_seconds is not None]
        return HookRun(
            seconds_per_step=statistics.median(seconds),
            seconds_per_step_mean=statistics.fmean(seconds),
            cpu_seconds_per_step=sum(each.cpu_seconds for each in ended) * share if whole else None,
            cpu_seconds_alone=statistics.fmean(each.cpu_seconds_alone for each in ended) if whole else None,
            compute_share=1 - statistics.fmean(spent) / elapsed[-1] if whole and spent else None,
            sent_bytes_per_step=sent,
            received_bytes_per_step=received,
            curve=curve,
            seconds_to_target=target.seconds if target else None,
            test_accuracy=curve[-1].accuracy if curve else None,
            test_loss=curve[-1].loss or None if curve else None,
            steps_done=len(elapsed),
            seconds=elapsed[-1],
            ended="target" if target else "steps" if whole else "limit",
            shaping=links.shaping,
            report=next((each.report for each in ended if each.report), ""),
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def last_line(error: str) -> str:
    """What a hook died of, for a table; the ranks' tracebacks before it, a screen or two, are in the file of results.

    >>> last_line("EngineError: rank 1 ended; last lines:\\n    [rank1]: NonFiniteError: w\\nstopped: rank 0")
    '[rank1]: NonFiniteError: w'
    >>> last_line("EngineError: the ranks ended with different models")
    'EngineError: the ranks ended with different models'
    """
    quoted = [line.strip() for line in error.splitlines() if line.startswith("    ")]  # as the engine quotes a process
    return quoted[-1] if quoted else error


@dataclass(kw_only=True)
class HooksBench(Bench[Cell, HookRun]):
    """Seconds per step, CPU time and bytes of every hook: models × links × hooks × seeds.

    Args:
        models: names.
        hooks: names that `hook` knows.
        links: rates of every rank's link; `none` or `unlimited` is no limit.
        data, ranks, steps, batch, lr, bucket_cap_mb, data_root: see `Cell`.
        seeds: how many runs of each, with seeds `seed`, `seed` + 1, ….

    Raises:
        ConfigError: nothing to measure, or a cell that cannot be.
    """

    models: Sequence[str] = ("lenet", "resnet20", "mlp-5m")
    hooks: Sequence[str] = (*STOCK, *OURS)
    links: Sequence[str] = ("10mbit", "100mbit", "1gbit", "none")
    data: str = "fashion-mnist"
    ranks: int = 4
    steps: int = 20
    batch: int | None = None
    lr: float | None = None
    seeds: int = 1
    seed: int = 0
    bucket_cap_mb: int | None = None
    data_root: str | None = None

    kinds = (HookRun,)
    defaults: ClassVar[Mapping[str, Any]] = {"authors": None}

    def __post_init__(self) -> None:
        if not self.cells():
            raise ConfigError("nothing to measure: name at least one model, one hook and one link")

    def cell(self, model: str, link: str, seed: int, name: str) -> Cell:
        """Returns one run."""
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Cell) if hasattr(self, each.name)}
        rate = None if link in ("none", "unlimited") else link
        mine = {"hook": name, "model": model, "link": rate, "seed": seed, "authors": self.authors(name)}
        return Cell(**own | mine)

    def authors(self, name: str) -> str | None:
        """Returns the file that a hook's optimizer is loaded from, as results tell it; None for hooks that need none.

        Raises:
            ConfigError: the file, or a package, is missing.
        """
        return identify(hook(name).id, {})

    def cells(self) -> list[Cell]:
        return [
            self.cell(model, link, seed, name)
            for model in self.models
            for link in self.links
            for seed in range(self.seed, self.seed + self.seeds)
            for name in self.hooks
        ]

    def thin_link(self) -> tuple[str | None, str]:
        return next((cell.link for cell in self.cells() if cell.link), None), "kernel"

    def failed(self, figures: HookRun) -> bool:
        return figures.error is not None

    def notes(self, measured: Measured[Cell, HookRun]) -> list[str]:
        ids = dict.fromkeys(hook(cell.hook).id for cell in measured)
        failed = [f"{cell} failed: {last_line(run.error)}" for cell, [run] in measured.items() if run.error]
        return [*(f"{name}: {NOTES[name]}" for name in ids if name in NOTES), *failed]

    def measure(self, cell: Cell, before: Measured[Cell, HookRun], tell: Tell) -> HookRun:
        return measure(cell, tell=tell)

    def tables(self, measured: Measured[Cell, HookRun]) -> list[Table]:
        """A line for each link and hook, per step and rank, medians over the seeds; accuracies of all seeds.

        The speed-up is over plain DDP on the same link, where that was run; `added` is CPU time beyond that of the same
        steps without any exchange.
        """
        tables = []
        for model in dict.fromkeys(cell.model for cell in measured):
            rows: dict[tuple[str | None, str], list[HookRun]] = {}
            for cell, [run] in measured.items():
                if cell.model == model:
                    rows.setdefault((cell.link, cell.hook), []).extend([run] if run.error is None else [])
            lines = [_line(link, name, runs, rows.get((link, "none"))) for (link, name), runs in rows.items()]
            header = ["link", "hook", "step ms", "speed-up", "CPU ms", "added", "sent", "accuracy"]
            tables.append(Table(header, lines, f"{model}, {self.ranks} ranks, {self.data}", left=2))
        return tables

    def chart(self, measured: Measured[Cell, HookRun]) -> Picture | None:
        steps = {cell: run.seconds_per_step for cell, [run] in measured.items() if run.seconds_per_step is not None}
        return draw_step_times(steps) if steps else None


def _line(link: str | None, name: str, runs: list[HookRun], plain: list[HookRun] | None) -> list[str]:
    if not runs:
        return [link or "unlimited", name, "failed", *[""] * 5]
    step, cpu, alone = (
        1e3 * median(runs, key) for key in ("seconds_per_step", "cpu_seconds_per_step", "cpu_seconds_alone")
    )
    sent = runs[0].sent_bytes_per_step
    return [
        *(link or "unlimited", name, f"{step:.1f}"),
        f"{1e3 * median(plain, 'seconds_per_step') / step:.1f}×" if plain else "",
        *(f"{cpu:.1f}", f"{cpu - alone:.1f}", "not counted" if sent is None else nbytes_text(sent)),
        ", ".join(f"{run.test_accuracy:.2%}" for run in runs if run.test_accuracy is not None),
    ]
