"""What a codec's speed is measured of: its own calls, and beside them what it is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from thinwire.codecs import Codec, Context, Step, decode
from thinwire.codecs.device import coders
from thinwire.codecs.device_coder import Entry
from thinwire.codecs.tensors import DeviceFlat
from thinwire.kernels.triton.workspace import DeviceWorkspace
from thinwire_lab.bench import peers, timing
from thinwire_lab.bench.inputs import ROTATION, Arrays
from thinwire_lab.bench.timing import Candidate

SLOW_TURNS = 3


def compressor(peer: peers.Peer, arrays: Arrays) -> tuple[list[Candidate], int]:
    """Of a raw compressor; and how many bytes it makes of a gradient."""
    values, other = arrays.gradients[0].numpy(), arrays.outs[0].numpy()
    packed = peer.encode(values)
    if not np.array_equal(np.frombuffer(peer.decode(packed), np.float32), values):
        raise AssertionError("a raw compressor is not lossless")  # a wrong call of ours would be a wrong row
    candidates = [
        Candidate("encode", lambda turn: peer.encode(values)),
        Candidate("decode", lambda turn: peer.decode(packed)),
        Candidate("memcpy", lambda turn: np.copyto(other, values)),
    ]
    return candidates, len(packed)


def on_cpu(codec: Codec, context: Context, frame: bytes, arrays: Arrays, turns: int) -> list[Candidate]:
    """Of a codec on the CPU: its calls, the machine's limits, and what a user would write."""
    values, residual, work, out = arrays.gradients[0], arrays.residuals[0], arrays.works[0], arrays.outs[0]
    gradient, scratch, other = values.numpy(), work.numpy(), out.numpy()
    slow_turns = min(turns, SLOW_TURNS)

    def restore(turn: int) -> None:
        if context.residual is not None:
            context.residual.copy_(residual)

    candidates = [
        Candidate("encode", lambda turn: context.encode(values), restore),
        Candidate("decode", lambda turn: decode(frame, out=out)),
        Candidate("accumulate", lambda turn: decode(frame, out=out, accumulate=True)),
        Candidate("memcpy", lambda turn: np.copyto(other, gradient)),
        Candidate("floor", lambda turn: timing.two_pass_floor(gradient, scratch), arrays.restore),
        Candidate("rmw", lambda turn: timing.read_modify_write(scratch)),
        Candidate("quantize", lambda turn: peers.quantize_per_tensor(values), turns=slow_turns),
    ]
    plain = peers.plain_torch(codec, values, work)
    if plain is not None:
        candidates.append(Candidate("torch", lambda turn: plain(), arrays.restore, turns=slow_turns))
    return candidates


def on_gpu(codec: Codec, frame: bytes, arrays: Arrays) -> list[Candidate]:
    """Of a codec on a GPU, or in Triton's interpreter."""
    gradients, works, outs = arrays.gradients, arrays.works, arrays.outs
    workspace, coder = DeviceWorkspace(arrays.device), coders()[type(codec.scheme)]
    context = codec.context(gradients[0])

    def encode(turn: int) -> Any:
        index = turn % ROTATION
        flat = DeviceFlat(gradients[index], "fp32", (arrays.size,))
        entry = Entry(codec, flat, works[index], Step(), "the gradient")
        given: dict[str, Any] = {"residual_scale": 1.0, "together": True, "workspace": workspace}
        pending = coder.start(codec.scheme, [entry], [gradients[index]], residuals=[works[index]], **given)
        workspace.join()
        return pending.finish  # waits, so it comes after the clock was read

    candidates = [
        Candidate("memcpy", lambda turn: outs[turn % ROTATION].copy_(gradients[turn % ROTATION])),
        Candidate("encode", encode, arrays.restore),
        Candidate("decode", lambda turn: decode(frame, out=outs[turn % ROTATION])),
        Candidate("accumulate", lambda turn: decode(frame, out=outs[turn % ROTATION], accumulate=True)),
        Candidate("whole_encode", lambda turn: context.encode(gradients[turn % ROTATION]), whole=True),
    ]

    def plain(encode: Callable[..., Any]) -> Callable[[int], Any]:
        return lambda turn: encode(gradients[turn % ROTATION], works[turn % ROTATION], 1.0)

    if codec.id == "3lc":
        candidates.append(Candidate("torch", plain(peers.encode_ternary), arrays.restore, waits=True))
        if arrays.device.type == "cuda":
            compiled = torch.compile(peers.encode_ternary)
            candidates.append(Candidate("compiled", plain(compiled), arrays.restore, waits=True))
    return candidates
