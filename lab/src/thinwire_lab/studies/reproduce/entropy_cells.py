"""What Øland & Raj's figures share: the trainings of a scale, the designs, and how findings are picked and summed up.

The network is the paper's; the images are a part of MNIST's, or of Fashion-MNIST's where MNIST is not installed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from thinwire.presentation.charts import Series
from thinwire_lab.studies.deviation import deviation
from thinwire_lab.studies.reproduce.averages import NETWORK, AveragesCell, AveragesFinding, Exchange
from thinwire_lab.studies.reproduce.entry import Scale, seeds
from thinwire_lab.studies.reproduce.stand_ins import stand_in

Found = Mapping[AveragesCell, AveragesFinding]

SCALED = (
    "The paper: MNIST, 60,000 images, 100 epochs, 5 workers, about 1,500 runs. Rates, batch and penalty, which it does "
    "not print, are ours. Fewer images give a lower accuracy; Fashion-MNIST has a higher entropy than MNIST."
)
_EXAMPLES: dict[Scale, int] = {"tiny": 200, "quick": 2000, "full": 10000}
_EPOCHS: dict[Scale, int] = {"tiny": 3, "quick": 40, "full": 100}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 2, "full": 10}
HISTOGRAM = 4
"""M of the paper's own choice."""


def cells(
    designs: Sequence[str], scale: Scale, *, probes: bool = False, exchange: Exchange = "server"
) -> list[AveragesCell]:
    """Returns the trainings of some designs, seed by seed."""
    _, name = stand_in(scale, *((NETWORK, each) for each in ("mnist", "fashion-mnist")), small=(NETWORK, "digits"))
    workers, batch, examples = (2, 10, _EXAMPLES["tiny"]) if name == "digits" else (5, 20, _EXAMPLES[scale])
    test = 200 if name == "digits" else 2000
    return [
        AveragesCell(
            design=design,
            data=f"{name}[train={examples},test={test},unit=true]",
            workers=workers,
            epochs=_EPOCHS[scale],
            steps_per_epoch=examples // workers // batch,
            batch=batch,
            seed=seed,
            probes=probes,
            exchange=exchange,
        )
        for seed in range(1 if probes else _SEEDS[scale])
        for design in designs
    ]


def fixed(bits: int) -> str:
    """Returns the design of so many bits for every weight."""
    return f"entropy[mode=fixed,bits={bits}]"


def adaptive(floor: int, histogram_bits: int = HISTOGRAM, rounding: str = "ceil") -> str:
    """Returns the design of N = H + c, c the floor, H of 2**M bins."""
    return f"entropy[c={floor},histogram_bits={histogram_bits},rounding={rounding}]"


def widths(found: Found) -> list[int]:
    """Returns how many inputs the network has, and how many units each layer."""
    digits = next(iter(found)).data.startswith("digits")
    return [64 if digits else 784, 392, 50, 10]


def setting(found: Found) -> str:
    """Returns in a sentence what was run."""
    first = next(iter(found))
    return (
        f"{'-'.join(map(str, widths(found)))} with tanh on {first.data}, {first.workers} workers of {first.batch} "
        f"examples, {first.epochs} epochs, weights averaged after each, half the squared error, ℓ1 of "
        f"{first.job().recipe().l1:g}, exponential decay of the rate, "
        f"{seeds(found)}. Accuracy is the mean of the last tenth of the epochs."
    )


def of(
    found: Found, design: str, figure: Callable[[AveragesFinding], float], exchange: Exchange = "server"
) -> list[float]:
    """Returns a figure of every seed of a design."""
    return [figure(f) for cell, f in found.items() if cell.design == design and cell.exchange == exchange]


def percent(finding: AveragesFinding) -> float:
    """Returns the test accuracy, in percent."""
    return 100 * finding.accuracy


def coded_bits(finding: AveragesFinding) -> float:
    """Returns the bits of a weight as it was sent, mean over the epochs."""
    return statistics.fmean(finding.coded)


def raw_bits(finding: AveragesFinding) -> float:
    """Returns the bits of a bin's number in the average, mean over the epochs."""
    return statistics.fmean(finding.raw)


def mean_line(found: Found, x: Sequence[float], designs: Sequence[str], figure: Callable[..., float]) -> Series:
    """Returns means over seeds by design, with their deviations where each design has several seeds."""
    each = [of(found, design, figure) for design in designs]
    means = [statistics.fmean(values) for values in each]
    if any(len(values) < 2 for values in each):
        return Series(label="mean", x=x, y=means)
    error = [deviation(values) for values in each]
    return Series(label="mean ± standard deviation", x=x, y=means, error=error)


def epochs(values: Sequence[object]) -> list[float]:
    """Returns 1, 2, … for as many values."""
    return [float(epoch) for epoch in range(1, len(values) + 1)]
