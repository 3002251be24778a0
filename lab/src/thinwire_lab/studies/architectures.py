"""The layers of published networks as data: the name and the number of values of every trained tensor.

Performance models, placements and histograms of layer sizes need them, without training. Sizes follow the papers'
tables; comments name the published implementation where a paper leaves a size open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from thinwire.errors import ConfigError
from thinwire_lab.workloads.models import model


@dataclass(frozen=True, slots=True)
class Tensor:
    """The name and the number of values of one trained tensor."""

    name: str
    numel: int


Tensors = Iterator[Tensor]
_Pairs = tuple[tuple[int, int], ...]


def architecture(name: str) -> tuple[Tensor, ...]:
    """Returns the trained tensors of a published network, from the input to the classifier.

    >>> {name: sum(each.numel for each in architecture(name)) for name in ARCHITECTURES}
    ... # doctest: +NORMALIZE_WHITESPACE
    {'alexnet': 60965224, 'googlenet': 6998552, 'vggnet-a': 132863336, 'resnet110': 1727962,
     'inception-v4': 42679816}
    """
    if name not in ARCHITECTURES:
        raise ConfigError(f"unknown architecture {name!r}; known are {', '.join(ARCHITECTURES)}")
    return tuple(ARCHITECTURES[name]())


def _biased(name: str, fan_in: int, units: int) -> Tensors:
    """A convolution (`fan_in`: channels times the filter's area) or a matrix, and its bias."""
    yield Tensor(f"{name}.weight", fan_in * units)
    yield Tensor(f"{name}.bias", units)


def _normalised(name: str, fan_in: int, units: int) -> Tensors:
    """A convolution without a bias, and the scale and shift of the batch norm behind it."""
    yield Tensor(f"{name}.weight", fan_in * units)
    yield Tensor(f"{name}.scale", units)
    yield Tensor(f"{name}.shift", units)


def _chain(convolutions: _Pairs, matrices: _Pairs) -> Tensors:
    for number, (fan_in, units) in enumerate((*convolutions, *matrices), start=1):
        yield from _biased(f"{'conv' if number <= len(convolutions) else 'fc'}{number}", fan_in, units)


def _alexnet() -> Tensors:
    """Krizhevsky et al. (2012): two groups in the second, fourth and fifth convolution, 224 × 224 inputs."""
    convolutions = ((363, 96), (1200, 256), (2304, 384), (1728, 384), (1728, 256))
    return _chain(convolutions, ((9216, 4096), (4096, 4096), (4096, 1000)))


def _vggnet_a() -> Tensors:
    """Simonyan and Zisserman (2014), table 1, column A."""
    channels = (3, 64, 128, 256, 256, 512, 512, 512, 512)
    convolutions = tuple((9 * before, units) for before, units in pairwise(channels))
    return _chain(convolutions, ((25088, 4096), (4096, 4096), (4096, 1000)))


# Channels in, then #1×1, #3×3 reduce, #3×3, #5×5 reduce, #5×5 and pool projection of Szegedy et al. (2014), table 1.
_INCEPTION_V1 = {
    "3a": (192, 64, 96, 128, 16, 32, 32),
    "3b": (256, 128, 128, 192, 32, 96, 64),
    "4a": (480, 192, 96, 208, 16, 48, 64),
    "4b": (512, 160, 112, 224, 24, 64, 64),
    "4c": (512, 128, 128, 256, 24, 64, 64),
    "4d": (512, 112, 144, 288, 32, 64, 64),
    "4e": (528, 256, 160, 320, 32, 128, 128),
    "5a": (832, 256, 160, 320, 32, 128, 128),
    "5b": (832, 384, 192, 384, 48, 128, 128),
}


def _googlenet() -> Tensors:
    """Szegedy et al. (2014), table 1, without the auxiliary classifiers, which TernGrad leaves out (§4.2)."""
    yield from _biased("conv1", 3 * 49, 64)
    yield from _biased("conv2.reduce", 64, 64)
    yield from _biased("conv2", 64 * 9, 192)
    for block, (channels, one, three_in, three, five_in, five, pool) in _INCEPTION_V1.items():
        yield from _biased(f"inception{block}.1x1", channels, one)
        yield from _biased(f"inception{block}.3x3.reduce", channels, three_in)
        yield from _biased(f"inception{block}.3x3", 9 * three_in, three)
        yield from _biased(f"inception{block}.5x5.reduce", channels, five_in)
        yield from _biased(f"inception{block}.5x5", 25 * five_in, five)
        yield from _biased(f"inception{block}.pool", channels, pool)
    yield from _biased("classifier", 1024, 1000)


def _resnet110() -> Tensors:
    """He et al., "Identity mappings in deep residual networks" (2016), for CIFAR-10, shortcuts without parameters."""
    net = model("resnet110", num_classes=10, in_shape=(3, 32, 32), seed=0)
    return (Tensor(name, each.numel()) for name, each in net.named_parameters())


# Szegedy et al. (2016), figures 3 to 9: every convolution's channels in, area of its filter, and channels out.
_Convolutions = tuple[tuple[int, int, int], ...]
_STEM: _Convolutions = (
    *((3, 9, 32), (32, 9, 32), (32, 9, 64), (64, 9, 96)),
    *((160, 1, 64), (64, 9, 96), (160, 1, 64), (64, 7, 64), (64, 7, 64), (64, 9, 96)),
    (192, 9, 192),
)
_A: _Convolutions = ((384, 1, 96), (384, 1, 64), (64, 9, 96), (384, 1, 64), (64, 9, 96), (96, 9, 96), (384, 1, 96))
_REDUCE_A: _Convolutions = ((384, 9, 384), (384, 1, 192), (192, 9, 224), (224, 9, 256))
_B: _Convolutions = (
    *((1024, 1, 384), (1024, 1, 192), (192, 7, 224), (224, 7, 256)),
    *((1024, 1, 192), (192, 7, 192), (192, 7, 224), (224, 7, 224), (224, 7, 256), (1024, 1, 128)),
)
_REDUCE_B: _Convolutions = (
    *((1024, 1, 192), (192, 9, 192)),
    *((1024, 1, 256), (256, 7, 256), (256, 7, 320), (320, 9, 320)),
)
_C: _Convolutions = (
    *((1536, 1, 256), (1536, 1, 384), (384, 3, 256), (384, 3, 256)),
    *((1536, 1, 384), (384, 3, 448), (448, 3, 512), (512, 3, 256), (512, 3, 256), (1536, 1, 256)),
)


def _inception_v4() -> Tensors:
    """Szegedy et al., "Inception-v4, Inception-ResNet and the impact of residual connections" (2016)."""
    blocks = [("stem", _STEM), *((f"a{n}", _A) for n in range(4)), ("reduce-a", _REDUCE_A)]
    blocks += [*((f"b{n}", _B) for n in range(7)), ("reduce-b", _REDUCE_B), *((f"c{n}", _C) for n in range(3))]
    for name, convolutions in blocks:
        for number, (channels, area, units) in enumerate(convolutions):
            yield from _normalised(f"{name}.{number}", channels * area, units)
    yield from _biased("classifier", 1536, 1000)


ARCHITECTURES: dict[str, Callable[[], Tensors]] = {
    "alexnet": _alexnet,
    "googlenet": _googlenet,
    "vggnet-a": _vggnet_a,
    "resnet110": _resnet110,
    "inception-v4": _inception_v4,
}
