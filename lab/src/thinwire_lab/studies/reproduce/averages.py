"""Trainings that average whole weights once an epoch, as cells (Øland & Raj, sections 2 and 5).

The network is the paper's; the images are a part of MNIST, or of Fashion-MNIST if MNIST is not installed. Biases travel
as floats and do not count. The probe reads worker 0's weights after the exchange that ends an epoch, when they are the
decoded average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal

import numpy as np
from torch import nn

from thinwire.codecs.entropy import MIN_SAMPLE, Entropy, bin_values, entropy_of
from thinwire.kernels.numba.stochastic import sample_of
from thinwire.presentation.charts import Series
from thinwire_lab.jobs import in_process
from thinwire_lab.jobs.grid import Tell
from thinwire_lab.jobs.history import HistoryRecorder
from thinwire_lab.jobs.job import Job
from thinwire_lab.studies.compare_rows import deviation
from thinwire_lab.studies.reproduce.entry import Finding, Found, Scale
from thinwire_lab.studies.reproduce.job_cells import JobCell, following, stand_in

SCALED = (
    "The paper: MNIST, 60,000 images, 100 epochs, 5 workers, about 1,500 runs. Rates, batch and penalty, which it does "
    "not print, are ours. Fewer images give a lower accuracy; Fashion-MNIST has a higher entropy than MNIST."
)
NETWORK = "mlp-tanh"
FLOATS = "float"  # the design that averages the same weights uncompressed
SHARES = (1.0, 0.1, 0.03, 0.01)
HISTOGRAM_BITS = (2, 4, 6, 8)
Exchange = Literal["server", "peers"]
"""The exchange of weights (section 2 allows both). `server`: a server averages the workers' weights and codes the
average again. `peers`: every worker sends its weights to all others and averages the decoded ones, coded once."""


class AveragesFinding(Finding, frozen=True, kw_only=True):
    """The results of a training, one value for each epoch."""

    accuracies: list[float]  # on the test set, 0 … 1
    coded: list[float]  # sent bits a weight with Huffman's table, mean over workers
    raw: list[float]  # bits of a bin's number, mean over the weights of the average; 32 for floats
    rms: list[list[float]]  # of the derivative of the loss, ℓ1's included, over an epoch's batches, by layer
    entropies: list[list[list[list[float]]]]  # of the average's weights, by layer, by `HISTOGRAM_BITS`, by `SHARES`

    @property
    def accuracy(self) -> float:
        """Mean of the last tenth of the epochs."""
        last = self.accuracies[-max(1, len(self.accuracies) // 10) :]
        return sum(last) / len(last)

    @property
    def peak(self) -> int:
        """The epoch, from 1, at which accuracy is highest: the paper's convergence."""
        return 1 + max(range(len(self.accuracies)), key=self.accuracies.__getitem__)


class AveragesCell(JobCell, frozen=True, kw_only=True):
    """One training of the tanh network; `probes` records derivatives and entropies.

    For an exchange among peers, a server computes their average, and its answer does not count.
    """

    finding = AveragesFinding

    design: str
    model: str = NETWORK
    epochs: int
    steps_per_epoch: int
    batch: int
    probes: bool = False
    exchange: Exchange = "server"

    def job(self, **more: Any) -> Job:
        floats = self.design == FLOATS
        return super().job(
            design="entropy" if floats else self.design,
            codec_up="fp32" if floats else None,
            codec_down="fp32" if floats or self.exchange == "peers" else None,
            steps=self.epochs * self.steps_per_epoch,
            eval_steps=self.steps_per_epoch,
            **more,
        )

    def run(self, tell: Tell) -> AveragesFinding:
        job, recorder = self.job(), HistoryRecorder()
        scheme = job.full_design().up.scheme
        probe = _Probe(self, scheme if isinstance(scheme, Entropy) else None)
        outcome = in_process.run(job, on_event=following(tell), metrics=[recorder], on_step=probe.stepped)
        accuracies = [point.accuracy for point in outcome.curve if point.step < outcome.steps]
        return AveragesFinding(
            accuracies=[*accuracies, outcome.test_accuracy],
            coded=[bits for bits in recorder.history().bits_push if bits > 0],
            raw=probe.raw,
            rms=probe.rms,
            entropies=probe.entropies,
        )


class _Probe:
    """Watches worker 0."""

    def __init__(self, cell: AveragesCell, codec: Entropy | None) -> None:
        self._cell, self._codec = cell, codec
        self._squares: list[float] = []
        self.raw: list[float] = []
        self.rms: list[list[float]] = []
        self.entropies: list[list[list[list[float]]]] = []

    def stepped(self, rank: int, step: int, loss: float, model: nn.Module) -> None:
        if rank:
            return
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        squares = [0.0 if each.grad is None else float(each.grad.square().mean()) for each in matrices]
        self._squares = [a + b for a, b in zip(self._squares or [0.0] * len(squares), squares, strict=True)]
        if (step + 1) % self._cell.steps_per_epoch:
            return
        rms = [(each / self._cell.steps_per_epoch) ** 0.5 for each in self._squares]
        self._squares = []
        weights = [each.detach().numpy().reshape(-1) for each in matrices]
        numel = sum(each.size for each in weights)
        if self._codec is None:
            self.raw.append(32.0)
        else:
            bits = [self._codec.num_bits(each, g) for each, g in zip(weights, rms, strict=True)]
            self.raw.append(sum(b * each.size for b, each in zip(bits, weights, strict=True)) / numel)
        if self._cell.probes:
            self.rms.append(rms)
            self.entropies.append([[[entropy(each, m, f) for f in SHARES] for m in HISTOGRAM_BITS] for each in weights])


def entropy(weights: np.ndarray[tuple[int, ...], np.dtype[np.float32]], num_bits: int, share: float) -> float:
    """Returns the entropy of a share of the weights in 2**num_bits bins, at least 1,000 weights or all (algorithm 1).

    >>> entropy(np.linspace(-1, 1, 4096, dtype=np.float32), 2, 1.0)
    2.0
    """
    sample = sample_of(weights, sample_size(weights.size, share))
    return entropy_of(bin_values(sample, low=float(weights.min()), high=float(weights.max()), num_bits=num_bits))


def sample_size(numel: int, share: float) -> int:
    """Returns the number of a layer's weights in a sample.

    >>> [sample_size(19_600, share) for share in (0.1, 0.03, 0.01)], sample_size(500, 0.1)
    ([1960, 1000, 1000], 500)
    """
    return min(numel, max(MIN_SAMPLE, int(np.ceil(share * numel))))


_EXAMPLES: dict[Scale, int] = {"tiny": 200, "quick": 2000, "full": 10000}
_EPOCHS: dict[Scale, int] = {"tiny": 3, "quick": 40, "full": 100}
_SEEDS: dict[Scale, int] = {"tiny": 1, "quick": 2, "full": 10}
HISTOGRAM = 4  # M of the paper's own choice


def cells(
    designs: Sequence[str], scale: Scale, *, probes: bool = False, exchange: Exchange = "server"
) -> list[AveragesCell]:
    """Returns the trainings of some designs, seed by seed."""
    _, name = stand_in(scale, *((NETWORK, each) for each in ("mnist", "fashion-mnist")), small=(NETWORK, "digits"))
    workers, batch, examples = (2, 10, _EXAMPLES["tiny"]) if name == "digits" else (5, 20, _EXAMPLES[scale])
    test = 200 if name == "digits" else 2000
    shared: dict[str, Any] = {"workers": workers, "epochs": _EPOCHS[scale], "batch": batch, "probes": probes}
    shared |= {"data": f"{name}[train={examples},test={test},unit=true]", "exchange": exchange}
    shared["steps_per_epoch"] = examples // workers // batch
    count = 1 if probes else _SEEDS[scale]
    return [AveragesCell(design=design, seed=seed, **shared) for seed in range(count) for design in designs]


def adaptive(floor: int, histogram_bits: int = HISTOGRAM, rounding: str = "ceil") -> str:
    """Returns the design of N = H + c, c the floor, H of 2**M bins."""
    return f"entropy[c={floor},histogram_bits={histogram_bits},rounding={rounding}]"


def widths(found: Found) -> list[int]:
    """Returns the number of inputs and the units of each layer."""
    return [64 if found.first[0].data.startswith("digits") else 784, 392, 50, 10]


def setting(found: Found) -> str:
    first, _ = found.first
    return (
        f"{'-'.join(map(str, widths(found)))} with tanh on {first.data}, {first.workers} workers of {first.batch} "
        f"examples, {first.epochs} epochs, weights averaged after each, half the squared error, ℓ1 of "
        f"{first.job().recipe().l1:g}, exponential decay of the rate, {found.seeds}. Accuracy is the mean of the last "
        "tenth of the epochs."
    )


def mean_line(found: Found, x: Sequence[float], designs: Sequence[str], figure: Callable[..., float]) -> Series:
    """Returns means over seeds by design, with their deviations if each design has several seeds."""
    each = [found.where(design=design).figures(figure) for design in designs]
    several = all(len(values) > 1 for values in each)
    label = "mean ± standard deviation" if several else "mean"
    return Series(label=label, x=x, y=list(map(fmean, each)), error=list(map(deviation, each)) if several else None)
