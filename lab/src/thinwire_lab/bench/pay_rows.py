"""The results of measured sweeps: speed-ups over uncompressed training, and errors of predictions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.planner.planning import WORTH
from thinwire.presentation.tables import Table
from thinwire.quantities import number_text
from thinwire_lab.bench.harness import Figures
from thinwire_lab.bench.names import SERVED, hook
from thinwire_lab.jobs.grid import Measured

KINDS = {"ddp": "DDP hook", "server": "server", "local": "local updates"}
CLOSE = 1.05
"""A verdict is right if the advised method is measured at most this many times as slow as the other choice."""
GOOD = 0.10
"""A good prediction's largest error, as a share of the measured seconds."""


@dataclass(frozen=True, kw_only=True)
class SweptMethod:
    """A model and a training method on all links; `links` has their rates with commas between."""

    model: str
    method: str
    data: str
    links: str
    ranks: int
    seconds: float
    seed: int

    def __str__(self) -> str:
        return f"{self.model}, {self.method}"

    @property
    def rates(self) -> list[str]:
        """The links, from fast to slow."""
        return self.links.split(",")

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        named = hook(self.method)
        return "server" if named.served else "local" if named.design is not None else "ddp"

    @property
    def period(self) -> int:
        """Steps between two exchanges; only methods of one period are compared."""
        return hook(self.method).period

    @property
    def uncompressed(self) -> bool:
        """Whether the method is the baseline of its kind."""
        named = hook(self.method)
        return named.id == "none" or not named.compresses


class AtLink(Figures, frozen=True, kw_only=True):
    """Seconds of a step at one link."""

    link: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """The prediction's error as a share of the measured seconds."""
        return self.predicted_s / self.measured_s - 1


class Paid(Figures, frozen=True, kw_only=True):
    """One sweep up to its last measured link, and the planner's measurement of a step without any exchange."""

    at: list[AtLink]
    alone_s: float
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The gain by compression for one model, link and kind of training; None if not measured.

    Attributes:
        best: the fastest fixed compressing method, as measured; speed-ups are over uncompressed.
        advised: the planner's choice; the uncompressed method if compression does not pay.
        right: whether the advised method is measured at most 1.05 times as slow as the alternative.
    """

    model: str
    link: str
    kind: str
    period: int
    plain_s: float
    best: str | None
    best_speedup: float | None
    auto_speedup: float | None
    advised: str | None
    advised_speedup: float | None
    right: bool | None


def pays_table(measured: Measured[SweptMethod, Paid], workers: int) -> Table:
    """Returns a line for each model, link, kind and period."""
    lines = [
        [
            *(row.model, row.link, _kind(row), milliseconds(row.plain_s)),
            *(number_text(row.best_speedup, ".2f", "×"), _short(row.best), number_text(row.auto_speedup, ".2f", "×")),
            *(number_text(row.advised_speedup, ".2f", "×"), _short(row.advised)),
            "–" if row.right is None else "right" if row.right else "wrong",
        ]
        for row in compare(measured)
    ]
    header = ["model", "link", "kind", "uncompressed, ms", "best fixed", "which", "auto"]
    title = f"Does it pay? {workers} workers, speed-ups over uncompressed training of the same kind"
    return Table([*header, "predicted", "advised", "verdict"], lines, title, left=3)


def prediction_tables(measured: Measured[SweptMethod, Paid]) -> list[Table]:
    """Returns a table for each model: milliseconds by method and link."""
    tables = []
    for model in dict.fromkeys(cell.model for cell in measured):
        own = {cell: run for cell, run in measured.items() if cell.model == model}
        links = list(dict.fromkeys(link for cell in own for link in cell.rates))
        lines = []
        for cell, run in own.items():
            found = {at.link: f"{milliseconds(at.measured_s)} ({at.error:+.0%})" for at in run.at}
            lines.append([cell.method, *(found.get(link, "–") for link in links)])
        tables.append(Table(["method", *links], lines, f"{model}: measured ms a step (the prediction's error)"))
    return tables


def compare(measured: Measured[SweptMethod, Paid]) -> list[Compared]:
    """Returns the gains by compression, by model, link, kind and period; only with an uncompressed run."""
    rows = []
    ways = sorted({(cell.kind, cell.period) for cell in measured}, key=lambda way: (list(KINDS).index(way[0]), way[1]))
    for model in dict.fromkeys(cell.model for cell in measured):
        for link in dict.fromkeys(link for cell in measured for link in cell.rates):
            for way in ways:
                found = {
                    cell: at
                    for cell, run in measured.items()
                    if cell.model == model and (cell.kind, cell.period) == way
                    for at in run.at
                    if at.link == link
                }
                plain = next((at for cell, at in found.items() if cell.uncompressed), None)
                if plain is not None:
                    rows.append(_compared(model, link, *way, plain, found))
    return rows


def _kind(row: Compared) -> str:
    return KINDS[row.kind] if row.period == 1 else f"{KINDS[row.kind]}, h={row.period}"


def _compared(
    model: str, link: str, kind: str, period: int, plain: AtLink, found: Mapping[SweptMethod, AtLink]
) -> Compared:
    auto = next((at for cell, at in found.items() if hook(cell.method).auto is not None), None)
    fixed = {cell.method: at for cell, at in found.items() if not cell.uncompressed and hook(cell.method).auto is None}
    own = next(cell.method for cell, at in found.items() if at is plain)
    best = min(fixed, key=lambda name: fixed[name].measured_s, default=None)
    likely = min(fixed, key=lambda name: fixed[name].predicted_s, default=None)
    speedup = plain.predicted_s / fixed[likely].predicted_s if likely else None
    compress = speedup is not None and speedup >= WORTH
    right = None
    if likely is not None:
        chosen, other = (fixed[likely], plain) if compress else (plain, fixed[likely])
        right = chosen.measured_s <= CLOSE * other.measured_s
    return Compared(
        model=model,
        link=link,
        kind=kind,
        period=period,
        plain_s=plain.measured_s,
        best=best,
        best_speedup=plain.measured_s / fixed[best].measured_s if best else None,
        auto_speedup=plain.measured_s / auto.measured_s if auto else None,
        advised=likely if compress else own if likely else None,
        advised_speedup=speedup,
        right=right,
    )


def summary(measured: Measured[SweptMethod, Paid]) -> dict[str, str]:
    """Returns a sentence by kind on the errors of predictions; `auto` has no separate prediction."""
    said = {}
    rows = compare(measured)
    for kind, title in KINDS.items():
        errors = [
            abs(at.error)
            for cell, run in measured.items()
            if cell.kind == kind and hook(cell.method).auto is None
            for at in run.at
        ]
        verdicts = [row.right for row in rows if row.kind == kind and row.right is not None]
        if errors:
            within = sum(each <= GOOD for each in errors)
            said[kind] = (
                f"{title}: predictions differ from measured steps by {statistics.median(errors):.0%} (median) and "
                f"{max(errors):.0%} (worst), {within} of {len(errors)} within {GOOD:.0%}; "
                f"{sum(verdicts)} of {len(verdicts)} verdicts right"
            )
    return said


def _short(name: str | None) -> str:
    """Returns a method's codec, for a table.

    >>> _short("server:int8"), _short("local-sgd[h=4,codec=3lc[s=1.5]]"), _short("none"), _short(None)
    ('int8', '3lc[s=1.5]', 'none', '–')
    """
    if name is None:
        return "–"
    codec = name.partition("codec=")[2].removesuffix("]")
    return codec or name.removeprefix(SERVED)


def milliseconds(seconds: float) -> str:
    """Returns milliseconds with three significant digits.

    >>> milliseconds(0.012345), milliseconds(1.23456)
    ('12.3', '1235')
    """
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"
