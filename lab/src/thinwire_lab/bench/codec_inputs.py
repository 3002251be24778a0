"""The arrays that a codec is measured on, and the timed candidates: its calls and their baselines."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from thinwire.codecs import Codec, Context, Step, decode
from thinwire.codecs.device import coders
from thinwire.codecs.device_coder import Entry
from thinwire.codecs.tensors import DeviceFlat
from thinwire.kernels.triton.workspace import DeviceWorkspace
from thinwire.policies.compression import codec_by_name
from thinwire_lab.bench import peers, timing
from thinwire_lab.bench.timing import Candidate

SLOW_TURNS = 3
BLOCK = 4096
ROTATION = 3
"""Number of inputs that alternate on a device, so that its cache holds none of them."""


def draw(size: int, zero_fraction: float, seed: int = 0) -> tuple[peers.Floats, peers.Floats]:
    """Returns a gradient and a residual; at s = 1 their sum quantises to about this share of zeros.

    Values are normal with a log-normal scale per block of 4,096, like those of layers, clipped at twice the quantile.
    """
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(size, dtype=np.float32)
    scales = np.exp(0.5 * generator.standard_normal(-(-size // BLOCK), dtype=np.float32))
    values *= np.repeat(scales, BLOCK)[:size]
    threshold = np.quantile(np.abs(values[: min(size, 4_000_000)]), zero_fraction)
    np.clip(values, -2 * threshold, 2 * threshold, out=values)
    residual = values * generator.uniform(0.2, 0.8, size).astype(np.float32)
    return values - residual, residual


class Arrays:
    """The arrays of all measurements of one size, allocated once.

    A large array gets huge pages by chance, which saves a fifth of the time: compared rows must share their arrays.

    Attributes:
        gradients, residuals: constant inputs.
        works: residuals that a measurement changes; `restore` copies `residuals` into them before a turn.
        outs: outputs of decoding and copying.
    """

    def __init__(self, size: int, device: torch.device, rotation: int) -> None:
        self.size, self.device = size, device
        self.gradients, self.residuals, self.works, self.outs = (
            [torch.from_numpy(np.zeros(size, np.float32)).to(device) for _ in range(rotation)] for _ in range(4)
        )
        self._zero_fraction: float | None = None
        self._contexts: dict[str, Context] = {}

    def fill(self, zero_fraction: float) -> None:
        """Draws data with this share of zeros, unless the arrays hold them."""
        if zero_fraction != self._zero_fraction:
            for seed, (gradient, residual) in enumerate(zip(self.gradients, self.residuals, strict=True)):
                for kept, drawn in zip((gradient, residual), draw(self.size, zero_fraction, seed), strict=True):
                    kept.copy_(torch.from_numpy(drawn))
            self._zero_fraction = zero_fraction

    def context(self, name: str) -> Context:
        """Returns the context of a codec, the same one for every share of zeros."""
        if name not in self._contexts:
            self._contexts[name] = codec_by_name(name).context(self.gradients[0])
        return self._contexts[name]

    def restore(self, turn: int) -> None:
        """Restores the residual of a turn."""
        index = turn % len(self.works)
        self.works[index].copy_(self.residuals[index])


def compressor(peer: peers.Peer, arrays: Arrays) -> tuple[list[Candidate], int]:
    """Returns the timed calls of a raw compressor, and its compressed bytes of a gradient."""
    values, other = arrays.gradients[0].numpy(), arrays.outs[0].numpy()
    packed = peer.encode(values)
    candidates = [
        Candidate("encode", lambda turn: peer.encode(values)),
        Candidate("decode", lambda turn: peer.decode(packed)),
        Candidate("memcpy", lambda turn: np.copyto(other, values)),
    ]
    return candidates, len(packed)


def on_cpu(codec: Codec, context: Context, frame: bytes, arrays: Arrays, turns: int) -> list[Candidate]:
    """Returns a codec's calls on the CPU, the machine's limits, and a user's alternatives."""
    values, residual, work, out = arrays.gradients[0], arrays.residuals[0], arrays.works[0], arrays.outs[0]
    gradient, scratch, other = values.numpy(), work.numpy(), out.numpy()
    slow_turns = min(turns, SLOW_TURNS)

    def restore(turn: int) -> None:
        if context.residual is not None:
            context.residual.copy_(residual)

    candidates = [
        Candidate("encode", lambda turn: context.encode(values), restore),
        Candidate("decode", lambda turn: decode(frame, out=out)),
        Candidate("memcpy", lambda turn: np.copyto(other, gradient)),
        Candidate("floor", lambda turn: timing.two_pass_floor(gradient, scratch), arrays.restore),
        Candidate("quantize", lambda turn: peers.quantize_per_tensor(values), turns=slow_turns),
    ]
    plain = peers.plain_torch(codec, values, work)
    if plain is not None:
        candidates.append(Candidate("torch", lambda turn: plain(), arrays.restore, turns=slow_turns))
    return candidates


def on_gpu(codec: Codec, frame: bytes, arrays: Arrays) -> list[Candidate]:
    """Returns a codec's calls on a GPU, or in Triton's interpreter."""
    gradients, works, outs = arrays.gradients, arrays.works, arrays.outs
    workspace, coder = DeviceWorkspace(arrays.device), coders()[type(codec.scheme)]

    def encode(turn: int) -> Any:
        index = turn % ROTATION
        flat = DeviceFlat(gradients[index], "fp32", (arrays.size,))
        entry = Entry(codec, flat, works[index], Step(), "the gradient")
        given: dict[str, Any] = {"residual_scale": 1.0, "together": True, "workspace": workspace}
        pending = coder.start(codec.scheme, [entry], [gradients[index]], residuals=[works[index]], **given)
        workspace.join()
        return pending.finish  # waits, so it comes after the clock was read

    return [
        Candidate("memcpy", lambda turn: outs[turn % ROTATION].copy_(gradients[turn % ROTATION])),
        Candidate("encode", encode, arrays.restore),
        Candidate("decode", lambda turn: decode(frame, out=outs[turn % ROTATION])),
    ]
