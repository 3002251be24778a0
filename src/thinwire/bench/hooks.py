"""DDP hooks side by side: ranks behind thin links, the same script, another hook each time.

Ranks join and warm up over unlimited links (uncompressed steps of a large model take half a minute at 10 Mbit/s, and
PowerSGD begins with two), then the links become thin and the clock starts. Bytes are what the kernel counted at each
rank's link. The figures are a rank's median step, its CPU time beside that of the same steps without any exchange,
and the curve of test accuracy over seconds of training, evaluations left out.

What a run says on its way is enough for its row: one that is cut short (`limit_s`), or fails, keeps its curve.
"""

from __future__ import annotations

import json
import socket
import statistics
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from thinwire.bench.hook_names import NOTES, hook
from thinwire.engines.links import Rate
from thinwire.engines.local import LocalEngine
from thinwire.engines.namespaces import Fabric
from thinwire.errors import ConfigError, EngineError, ThinwireError
from thinwire.jobs.run import choose_links

BATCHES = {"lenet": 16, "resnet20": 8, "mlp-5m": 32}
"""Examples per rank and step that the bars in `docs/ddp.md` are stated for."""

PORT = 29400
SILENCE_S = 900.0
OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of one hook.

    Args:
        hook: a name that `hook_names.hook` knows, as in `3lc[s=1.75,start_step=50]`.
        model: a model's name.
        data: a data set's name.
        link: rate of every rank's link, as in `10mbit`; None is unlimited.
        ranks: how many ranks train.
        steps: measured steps.
        warmup: steps before, over unlimited links; at least 3, because PowerSGD's first two are uncompressed. A hook's
            `start_step` counts from the first of them.
        batch: examples per rank and step; None takes `BATCHES`, or the recipe's.
        lr: the largest learning rate; None takes the recipe's.
        seed: of weights, batches and random codecs.
        eval_every: measured steps between evaluations; 0 evaluates at the end alone.
        eval_examples: evaluate on the first so many test examples; None takes all.
        target: stop at this test accuracy; None runs all steps.
        bucket_cap_mb: of DDP; None is DDP's default, and 100 for PowerSGD, which needs one bucket on gloo.
        data_root: where to look for data that is not in its usual place.
    """

    hook: str
    model: str = "lenet"
    data: str = "fashion-mnist"
    link: str | None = None
    ranks: int = 4
    steps: int = 20
    warmup: int = 3
    batch: int | None = None
    lr: float | None = None
    seed: int = 0
    eval_every: int = 0
    eval_examples: int | None = None
    target: float | None = None
    bucket_cap_mb: int | None = None
    data_root: str | None = None

    def __post_init__(self) -> None:
        hook(self.hook)
        if self.warmup < 3 or self.steps < 1 or self.ranks < 2:
            raise ConfigError(
                f"{self.ranks} ranks, {self.warmup} warm-up and {self.steps} measured steps; needed are 2, 3 and 1"
            )
        if self.target is not None and self.eval_every < 1:
            raise ConfigError("a target accuracy needs eval_every, the steps between evaluations")

    def to_json(self) -> str:
        """Returns the cell as a rank's command line carries it."""
        return json.dumps(asdict(self))


@dataclass(slots=True)
class _Heard:
    """What the ranks of one run have said so far."""

    elapsed: list[float] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)
    outcomes: list[dict[str, Any]] = field(default_factory=list)

    def take(self, data: dict[str, Any]) -> None:
        if data["event"] == "progress":
            self.elapsed.append(data["seconds"])
        elif data["event"] == "score":
            self.curve.append({key: data[key] for key in ("step", "seconds", "accuracy")})
        elif data["event"] == "outcome":
            self.outcomes.append(data)


def run_cell(
    cell: Cell,
    rank_command: Iterable[str],
    *,
    limit_s: float | None = None,
    on_event: OnEvent = lambda process, event: None,
) -> dict[str, Any]:
    """Measures one cell.

    Args:
        cell: what to run.
        rank_command: the command of a rank, to which `--cell --rank --master --gate` are added.
        limit_s: end the run once it has trained for so many seconds; None lets it go on.
        on_event: hears what the ranks report.

    Returns:
        The cell, and: `seconds_per_step` (median) and `seconds_per_step_mean`, `cpu_seconds_per_step` and
        `cpu_seconds_alone` (the same without any exchange; None where the run was cut short), `sent_bytes_per_step`
        and `received_bytes_per_step` (mean over ranks; None on unshaped loopback), `curve`, `seconds_to_target`
        (None where it was not reached), `test_accuracy` (the last), `steps_done`, `seconds`, `ended` (`"steps"`,
        `"target"` or `"limit"`), `shaping`, `note` and `error` (None here).

    Raises:
        EngineError: the kernel cannot shape links here, a rank failed, or ranks ended with different models.
    """
    links = choose_links(cell.link, "kernel" if cell.link else "auto")
    names = [f"rank {rank}" for rank in range(cell.ranks)]
    heard = _Heard()
    with ExitStack() as stack:
        gate = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fabric = None
        if links.shaping == "kernel":
            fabric = stack.enter_context(Fabric(dict.fromkeys(names, Rate(None))))
        engine = stack.enter_context(
            LocalEngine(fabric=fabric, environment={"GLOO_SOCKET_IFNAME": "eth0" if fabric else "lo"})
        )
        master = f"{fabric.addresses[names[0]]}:{PORT}" if fabric else f"127.0.0.1:{_free_port()}"
        for rank, name in enumerate(names):
            options = ["--cell", cell.to_json(), "--rank", str(rank), "--master", master, "--gate", str(gate)]
            engine.start(name, [*rank_command, *options], host=name if fabric else None)

        counts: list[tuple[int, int]] = []

        def count() -> None:
            if fabric is not None:
                counts.append((sum(map(fabric.bytes_sent, names)), sum(map(fabric.bytes_received, names))))

        waiting = 0
        for event in engine.events(silence_s=SILENCE_S):
            on_event(event.process, event.data)
            heard.take(event.data)
            if limit_s is not None and heard.elapsed and heard.elapsed[-1] > limit_s and len(counts) < 2:
                count()
                break
            kind = event.data["event"]
            if kind not in ("warm", "measured"):
                continue
            waiting += 1
            if waiting == cell.ranks:
                waiting = 0
                if fabric is not None and kind == "warm":
                    for name in names:
                        fabric.set_rate(name, links.rate)
                count()
                (gate / kind).touch()
    return _row(cell) | {"shaping": links.shaping} | _figures(cell, heard, counts)


def attempt(
    cell: Cell,
    rank_command: Iterable[str],
    *,
    limit_s: float | None = None,
    on_event: OnEvent = lambda process, event: None,
) -> dict[str, Any]:
    """As `run_cell`, for one run among many: a hook that fails gives a row of what it got to, and `error` says how."""
    heard = _Heard()

    def listen(process: str, event: dict[str, Any]) -> None:
        heard.take(event)
        on_event(process, event)

    try:
        return run_cell(cell, rank_command, limit_s=limit_s, on_event=listen)
    except ThinwireError as error:
        got_to = {"curve": heard.curve, "steps_done": len(heard.elapsed), "seconds": max(heard.elapsed, default=0.0)}
        return _row(cell) | got_to | {"error": f"{type(error).__name__}: {error}", "ended": "error"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _row(cell: Cell) -> dict[str, Any]:
    """A cell's row before anything was measured."""
    figures = (
        *("seconds_per_step", "seconds_per_step_mean", "cpu_seconds_per_step", "cpu_seconds_alone", "shaping"),
        *("sent_bytes_per_step", "received_bytes_per_step", "seconds_to_target", "test_accuracy"),
    )
    return {
        **asdict(cell),
        **dict.fromkeys((*figures, "error")),
        "curve": [],
        "steps_done": 0,
        "seconds": 0.0,
        "report": "",
        "note": NOTES.get(hook(cell.hook).id, ""),
    }


def _figures(cell: Cell, heard: _Heard, counts: list[tuple[int, int]]) -> dict[str, Any]:
    if len({outcome["weights"] for outcome in heard.outcomes}) > 1:
        raise EngineError(f"{cell.hook}: the ranks ended with different models; no hook here allows that")
    done = len(heard.elapsed)
    seconds = [after - before for before, after in zip([0.0, *heard.elapsed], heard.elapsed, strict=False)]
    share = 1 / (done * cell.ranks)
    sent, received = ((counts[1][way] - counts[0][way]) * share for way in (0, 1)) if len(counts) == 2 else (None, None)
    reached = [point for point in heard.curve if cell.target is not None and point["accuracy"] >= cell.target]
    cut_short = len(heard.outcomes) < cell.ranks
    figures = {
        "steps_done": done,
        "seconds": heard.elapsed[-1],
        "seconds_per_step": statistics.median(seconds),
        "seconds_per_step_mean": statistics.fmean(seconds),
        "sent_bytes_per_step": sent,
        "received_bytes_per_step": received,
        "curve": heard.curve,
        "seconds_to_target": reached[0]["seconds"] if reached else None,
        "test_accuracy": heard.curve[-1]["accuracy"] if heard.curve else None,
        "ended": "target" if reached else "limit" if cut_short else "steps",
    }
    if not cut_short:
        figures |= {
            "cpu_seconds_per_step": statistics.fmean(o["cpu_seconds"] for o in heard.outcomes) / done,
            "cpu_seconds_alone": statistics.fmean(o["cpu_seconds_alone"] for o in heard.outcomes),
            "report": next(o["report"] for o in heard.outcomes if o["rank"] == 0),
        }
    return figures
