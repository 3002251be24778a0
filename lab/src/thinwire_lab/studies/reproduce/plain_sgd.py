"""The methods that DoubleSqueeze §5.1 compares, and on what: plain SGD at the workers, what is compressed on the way.

SGD itself is the same design without a codec, so that nothing but the codecs differs: MEM-SGD pulls float32 averages,
and with float32 pushes no residual is left.
"""

from __future__ import annotations

from typing import Any

from thinwire_lab.studies.reproduce.entry import Scale
from thinwire_lab.studies.reproduce.job_cells import SMALL, Pair, TrainingCell, stand_in

SGD = "SGD"
_DESIGNS = {
    "DoubleSqueeze 1-bit": "doublesqueeze-1bit",
    "MEM-SGD 1-bit": "mem-sgd-1bit",
    "QSGD": "qsgd-ds",
    "DoubleSqueeze top-k": "doublesqueeze-topk",
    "MEM-SGD top-k": "mem-sgd-topk",
    "Top-k SGD": "topk-sgd",
}
ONE_BIT = ("DoubleSqueeze 1-bit", "MEM-SGD 1-bit", "QSGD", SGD)
TOP_K = ("DoubleSqueeze top-k", "MEM-SGD top-k", "Top-k SGD", SGD)  # as figures 1 to 3 and 4 to 6 name them


def choices(method: str) -> tuple[str, str | None]:
    """Returns the `design` and the `codec_up` of a `jobs.job.Job` that make a method."""
    return ("mem-sgd-1bit", "fp32") if method == SGD else (_DESIGNS[method], None)


class OfMethod:
    """What cells of a method have in common; `codec_up` is in place of the design's own."""

    __slots__ = ()
    design: str
    codec_up: str | None

    @classmethod
    def of(cls, method: str, **others: Any) -> Any:
        design, codec_up = choices(method)
        return cls(design=design, codec_up=codec_up, **others)

    @property
    def method(self) -> str:
        return (
            SGD if self.codec_up == "fp32" else next(name for name, known in _DESIGNS.items() if known == self.design)
        )


class PlainCell(OfMethod, TrainingCell, frozen=True, kw_only=True):
    """One training."""

    codec_up: str | None = None


def pair(scale: Scale) -> Pair:
    """Returns the model and the data of a scale: of losses and of seconds the same, for they are one paper's."""
    return stand_in(scale, ("lenet5", "fashion-mnist")) if scale == "full" else SMALL
