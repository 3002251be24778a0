"""How fast GPU kernels are, beside the device's own copy bandwidth and beside what a user would write.

Device times come from events on the stream: the device is first given something to do, so that the launches are
queued by the time it gets to them and their cost in Python is not counted. The limits are computed from a measured
device-to-device copy: an encoder with a residual moves 20 bytes a value (two passes), a decoder writes 4 and reads the
payload. Whole calls, which end with the frame on the host, are timed on the host's clock beside that.

Inputs take turns, so that none is found in a cache that a training step would not have left it in.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thinwire.bench import torch_ternary
from thinwire.bench.codec_figures import resnet50_sizes
from thinwire.bench.codecs import draw
from thinwire.bench.harness import Bench, Figures, Measured, Tell, column
from thinwire.codecs import Codec, Step, decode, encode_all
from thinwire.codecs import codec as make_codec
from thinwire.codecs.device import Entry, coders
from thinwire.codecs.tensors import DeviceFlat
from thinwire.errors import ConfigError
from thinwire.frames import parse
from thinwire.jobs.tables import Table
from thinwire.kernels import triton
from thinwire.kernels.triton.workspace import DeviceWorkspace

SIZES = (100_000_000, 25_600_000, 1_000_000)
ZERO_FRACTIONS = (0.8, 0.95, 0.99)
CODECS = ("3lc", "int8", "onebit")
ROTATION = 3
ENCODE_NBYTES = 20  # a value: gradient and residual read twice, residual written once
HEAD_START_CYCLES = 4_000_000  # a few milliseconds
LIST = "list"

Action = Callable[[int], Any]


@dataclass(frozen=True)
class Cell:
    """A codec, or `LIST` for the list of tensors; that many values, that share of them zero."""

    codec: str
    elements: int
    zero_fraction: float
    turns: int
    device: str

    def __str__(self) -> str:
        return f"{self.codec}, {self.elements:,} values"


class DeviceSpeed(Figures, frozen=True, kw_only=True):
    """Speeds of a codec on a device in 10⁹ bytes a second, and ratios to what it is held against.

    Attributes:
        device_name: what was measured.
        copy_gbps: bytes read and written by a device-to-device copy.
        encode_vs_floor, decode_vs_floor: of the time that the copy's bandwidth allows.
        encode_vs_torch, encode_vs_compiled: times the speed of torch's operators, as they are and compiled.
        seconds: medians, by what was timed.
    """

    device_name: str
    bits_per_value: float
    copy_gbps: float
    encode_gbps: float
    decode_gbps: float
    encode_vs_floor: float
    decode_vs_floor: float
    encode_vs_torch: float | None
    encode_vs_compiled: float | None
    seconds: dict[str, float]


class DeviceList(Figures, frozen=True, kw_only=True):
    """Seconds of a model's tensors in one call, and of one flat tensor of the same size."""

    tensors: int
    elements: int
    list_seconds: float
    flat_seconds: float


@dataclass(kw_only=True)
class DeviceBench(Bench[Cell, Figures]):
    """Codecs on a GPU, beside its own copy and torch's operators.

    Args:
        only: ids among `CODECS`, whose launches are all queued at once; with their defaults and error feedback.
        elements: numbers of values.
        zero_fraction: shares of the values that 3LC quantises to zero.
        turns: timed turns of each candidate; medians are reported.
        device: "cuda", or "cuda:1" …; "cpu" runs Triton's interpreter, whose times say nothing about a GPU.

    Raises:
        ConfigError: no such device, no Triton, or another codec.
    """

    only: Sequence[str] = CODECS
    elements: Sequence[int] = SIZES
    zero_fraction: Sequence[float] = ZERO_FRACTIONS
    turns: int = 9
    device: str = "cuda"

    kinds = (DeviceSpeed, DeviceList)
    columns = (
        ("codec", lambda cell, runs: cell.codec),
        ("values", lambda cell, runs: f"{cell.elements:,}"),
        ("zeros", lambda cell, runs: f"{cell.zero_fraction:g}"),
        column("copy GB/s", "copy_gbps"),
        column("encode GB/s", "encode_gbps"),
        column("decode GB/s", "decode_gbps"),
        column("encode of floor", "encode_vs_floor"),
        column("decode of floor", "decode_vs_floor"),
        column("encode × torch", "encode_vs_torch"),
    )

    def __post_init__(self) -> None:
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("torch finds no CUDA device here; leave --device out to measure the CPU's kernels")
        if missing := triton.missing():
            raise ConfigError(f"{missing}; there is nothing to measure")
        if others := [codec_id for codec_id in self.only if codec_id not in CODECS]:
            raise ConfigError(f"the GPU bench does not measure {others}; it measures {list(CODECS)}")

    def cells(self) -> list[Cell]:
        cells = [
            Cell(codec_id, elements, fraction, self.turns, self.device)
            for elements in self.elements
            for fraction in self.zero_fraction
            for codec_id in self.only
        ]
        return [*cells, Cell(LIST, sum(resnet50_sizes()), 0.95, self.turns, self.device)]

    def measure(self, cell: Cell, before: Measured[Cell, Figures], tell: Tell) -> Figures:
        place = torch.device(cell.device)
        if cell.codec == LIST:
            return measure_list(make_codec("3lc"), resnet50_sizes(), cell.turns, place)
        codec = make_codec(cell.codec, error_feedback=True)
        return measure(codec, cell.elements, cell.zero_fraction, cell.turns, place)

    def tables(self, measured: Measured[Cell, Figures]) -> list[Table]:
        return super().tables({cell: runs for cell, runs in measured.items() if cell.codec != LIST})

    def notes(self, measured: Measured[Cell, Figures]) -> list[str]:
        return [
            f"a list shaped like ResNet-50's: {run.list_seconds / run.flat_seconds:.2f} × one flat tensor of its size"
            for [run] in measured.values()
            if isinstance(run, DeviceList)
        ]


def measure(codec: Codec, size: int, zero_fraction: float, turns: int, device: torch.device) -> DeviceSpeed:
    """One codec at one size: encode, decode and accumulate, beside the copy and (for 3lc) torch's operators."""
    inputs = [_inputs(size, zero_fraction, seed, device) for seed in range(ROTATION)]
    kept = [residual.clone() for _, residual in inputs]
    workspace, coder = DeviceWorkspace(device), coders()[type(codec.scheme)]
    frame = codec.context(inputs[0][0]).encode(inputs[0][0])
    outs = [torch.zeros(size, device=device) for _ in range(ROTATION)]

    def restore(turn: int) -> None:
        inputs[turn % ROTATION][1].copy_(kept[turn % ROTATION])

    def encode(turn: int) -> Any:
        gradient, residual = inputs[turn % ROTATION]
        flat = DeviceFlat(gradient, "fp32", (size,))
        pending = coder.start(codec.scheme, [Entry(codec.scheme, flat, residual, 1.0, True, Step())], workspace)
        workspace.join()
        return pending.finish  # waits, so it comes after the clock was read

    seconds = {
        "copy": device_seconds(lambda turn: outs[turn % ROTATION].copy_(inputs[turn % ROTATION][0]), turns, device),
        "encode": device_seconds(encode, turns, device, restore),
        "decode": device_seconds(lambda turn: decode(frame, out=outs[turn % ROTATION]), turns, device),
        "accumulate": device_seconds(
            lambda turn: decode(frame, out=outs[turn % ROTATION], accumulate=True), turns, device
        ),
    }
    if codec.id == "3lc":
        plain = {"torch": torch_ternary.encode}
        if device.type == "cuda":
            plain["compiled"] = torch.compile(torch_ternary.encode)
        for name, function in plain.items():
            seconds[name] = device_seconds(_calling(function, inputs), turns, device, restore, waits=True)
    context = codec.context(inputs[0][0])
    seconds["whole_encode"] = host_seconds(lambda turn: context.encode(inputs[turn % ROTATION][0]), turns, device)
    payload_nbytes = len(parse(frame, copy=False).payload)
    bandwidth = 8 * size / seconds["copy"]
    return DeviceSpeed(
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter",
        bits_per_value=8 * payload_nbytes / size,
        copy_gbps=1e-9 * bandwidth,
        encode_gbps=4e-9 * size / seconds["encode"],
        decode_gbps=4e-9 * size / seconds["decode"],
        encode_vs_floor=ENCODE_NBYTES * size / bandwidth / seconds["encode"],
        decode_vs_floor=(4 * size + payload_nbytes) / bandwidth / seconds["decode"],
        encode_vs_torch=seconds["torch"] / seconds["encode"] if "torch" in seconds else None,
        encode_vs_compiled=seconds["compiled"] / seconds["encode"] if "compiled" in seconds else None,
        seconds=seconds,
    )


def measure_list(codec: Codec, sizes: Sequence[int], turns: int, device: torch.device) -> DeviceList:
    """A model's tensors in one call beside one flat tensor of the same size; whole calls, frames on the host."""
    gradient, _ = _inputs(sum(sizes), 0.95, 0, device)
    tensors = list(torch.split(gradient, list(sizes)))
    contexts, flat = [codec.context(tensor) for tensor in tensors], codec.context(gradient)
    return DeviceList(
        tensors=len(tensors),
        elements=gradient.numel(),
        list_seconds=host_seconds(lambda turn: encode_all(contexts, tensors), turns, device),
        flat_seconds=host_seconds(lambda turn: flat.encode(gradient), turns, device),
    )


def device_seconds(
    action: Action,
    turns: int,
    device: torch.device,
    prepare: Action = lambda turn: None,
    *,
    waits: bool = False,
) -> float:
    """Median time that the device spends on `action`, which may return a function to be called after each turn.

    Args:
        waits: the action waits for the device itself, so that a head start would be counted.
    """
    if device.type != "cuda":
        return host_seconds(action, turns, device, prepare)
    measured = []
    for turn in range(-2, turns):
        prepare(turn)
        torch.cuda.synchronize(device)
        if not waits:
            torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        finish = action(turn)
        end.record()
        torch.cuda.synchronize(device)
        if callable(finish):
            finish()
        if turn >= 0:
            measured.append(1e-3 * float(begin.elapsed_time(end)))
    return statistics.median(measured)


def host_seconds(action: Action, turns: int, device: torch.device, prepare: Action = lambda turn: None) -> float:
    """Median time on the host's clock, until the device has finished."""
    measured = []
    for turn in range(-2, turns):
        prepare(turn)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        finish = action(turn)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 0:
            measured.append(time.perf_counter() - begin)
        if callable(finish):
            finish()
    return statistics.median(measured)


def _inputs(size: int, zero_fraction: float, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, residual = draw(size, zero_fraction, seed)
    return torch.from_numpy(gradient).to(device), torch.from_numpy(residual).to(device)


def _calling(function: Callable[..., Any], inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Action:
    def call(turn: int) -> None:
        function(*inputs[turn % ROTATION], 1.0)

    return call
