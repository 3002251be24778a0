"""The designs that come with thinwire: each paper's own choices, and what options in brackets change of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from thinwire.codecs.registry import codec
from thinwire.errors import ConfigError
from thinwire.names import parse_name
from thinwire.policies.compression import codec_by_name
from thinwire.policies.local_updates import KINDS as LOCAL_KINDS
from thinwire.policies.local_updates import OPTIONS, STEERS_FROM, Kind
from thinwire.schema import Reduce


def both_ways(codec_id: str, **fixed: Any) -> Callable[..., dict[str, Any]]:
    """The same codec both ways; options go to it, but `error_scale` to the pushes alone."""

    def make(**options: Any) -> dict[str, Any]:
        made = codec(codec_id, **{**fixed, **options})
        return {"up": made, "down": replace(made, error_scale=1.0)}

    return make


def averaged(
    up: str, down: str, up_feedback: bool, down_feedback: bool | None, **fixed: Any
) -> Callable[..., dict[str, Any]]:
    """Workers run the optimizer on the average gradient; options go to the codec of the pushes, both ways if it is."""

    def make(**options: Any) -> dict[str, Any]:
        chosen = {**fixed, **options}
        return {
            "up": codec(up, **{"error_feedback": up_feedback, **chosen}),
            "down": codec(down, **{"error_feedback": down_feedback, **(chosen if down == up else {})}),
            "downlink": "gradient",
        }

    return make


def _local2(steps: int = 2, **options: Any) -> dict[str, Any]:
    return {**both_ways("fp32")(**options), "consistency": f"local[steps={steps}]"}


def _terngrad(ema: float = 0.0, last_layer: str = "fp32", **options: Any) -> dict[str, Any]:
    return {
        "up": codec("terngrad", **options),
        "down": codec("votes"),
        "downlink": "gradient",
        "transmission": "traditional",
        "last_layer": last_layer,
        "digest_every": 100,
        "ema": ema,
    }


def _entropy(**options: Any) -> dict[str, Any]:
    made = codec("entropy", **{"error_feedback": False, **options})
    return {"up": made, "down": made, "downlink": "weights", "every": "epoch", "transmission": "traditional"}


def _mps(staleness: int = 5, fraction: float = 0.01, **options: Any) -> dict[str, Any]:
    both = both_ways("topk", error_feedback=True)(fraction=fraction, **options)
    return {**both, "consistency": f"ssp[staleness={staleness},mode=passive]"}


def _local(kind: Kind) -> Callable[..., dict[str, Any]]:
    """Workers run their own optimizer; options are of the local updates, `codec`, `codec_down`, and the codec's own.

    Norms and biases of transformers are a quarter of what `update` would send with float32 in place of `small`. Large
    tensors are cut, as all ranks would wait for the link of one that owned most of the model; but not where the codec
    works on tiles of whole matrices.
    """

    def make(
        codec: str | None = None,
        codec_down: str | None = None,
        reduce: Reduce = kind.reduce,
        small: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        timetable = {name: value for name, value in options.items() if name in OPTIONS}
        own = {name: value for name, value in options.items() if name not in OPTIONS}
        local = replace(kind.updates, **{"steer": 0.0, **timetable})
        if "steer" not in timetable and reduce != "sum" and local.sends_means and local.h >= STEERS_FROM:
            local = replace(local, steer=kind.updates.steer)
        _check_options(codec or kind.codec, own)
        given = {**_options_of(kind, codec, own), **own}
        pushes = codec_by_name(codec or kind.codec, **{"nonfinite": "skip", **given})
        # What is left out of a pull waits at all workers: in place of a codec that selects, pulls have the design's.
        selects = codec is not None and pushes.scheme.sends_some and not codec_by_name(kind.codec).scheme.sends_some
        if pulled := codec_down or (None if codec else kind.down):
            pulls = codec_by_name(pulled)
        elif selects:
            pulls = codec_by_name(kind.codec, **kind.options)
        else:
            down = {**given, **({} if codec else kind.down_options), **own}
            pulls = codec_by_name(
                codec or kind.codec, **{k: v for k, v in down.items() if k not in ("nonfinite", "error_scale")}
            )
        sends_some = pushes.scheme.sends_some or pulls.scheme.sends_some
        averages_senders = kind.steers_by_some and "senders" in reduce
        if "steer" not in timetable and sends_some and not averages_senders:
            local = replace(local, steer=0.0)  # what waited in residuals for many rounds is not one round's work
        if small is None:
            small = "fp32" if pushes.id == "fp32" else kind.small if selects or not codec else "bf16"
        return {
            "up": pushes,
            "down": pulls,
            "compression": f"by-shape[small={small}]",
            "local": local,
            "consistency": local.consistency,
            "placement": "heuristic" if getattr(pushes.scheme, "layout", "") == "tiles" else "uniform[min=4096]",
            "reduce": reduce,
        }

    return make


def _options_of(kind: Kind, named: str | None, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a design's options for its codec, or for a codec that is named in its place without options."""
    if not named:
        return kind.options
    codec_id, own = parse_name(named, "codec")
    found = kind.others.get(codec_id, {})
    return {} if {"block", *found} & {*own, *given} else found


def _check_options(of: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that neither local updates nor their codec, by name, have."""
    codec_id = parse_name(of, "codec")[0]
    known = [name for name in codec(codec_id).config() if name != "id"]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(
            f"unknown option {unknown[0]!r}; local updates have {', '.join(OPTIONS)}, codec, codec_down, small and "
            f"reduce, and their codec {codec_id} has {', '.join(known)}"
        )


_K = 1 / 32
"""DoubleSqueeze's k: 300,000 values, about 1/32 of the parameters (§5.2)."""

SHIPPED: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "fp32": (both_ways("fp32"), "no compression (3LC §4.2, 32-bit float)"),
    "fp16": (both_ways("fp16"), "half precision both ways"),
    "bf16": (both_ways("bf16"), "bfloat16 both ways"),
    "int8": (both_ways("int8"), "255 levels (3LC §4.2, 8-bit int)"),
    "local2": (_local2, "transmit every 2nd step what accumulated (3LC §4.2, 2 local steps)"),
    "3lc": (
        both_ways("3lc"),
        "3-value quantisation with sparsity multiplication, base-3⁵, zero runs, residuals (3LC §3)",
    ),
    "terngrad": (_terngrad, "clipped stochastic ternary up with shared scalars, exact votes down (TernGrad §3)"),
    "doublesqueeze-1bit": (
        averaged("onebit", "onebit", True, True),
        "1 bit both passes, residual on both (DoubleSqueeze algorithm 1, §5.1)",
    ),
    "doublesqueeze-topk": (
        averaged("topk", "topk", True, True, fraction=_K),
        "top-k both passes, residual on both (DoubleSqueeze §5.1)",
    ),
    "mem-sgd-1bit": (
        averaged("onebit", "fp32", True, None),
        "1 bit with residual up, uncompressed down (DoubleSqueeze §5.1)",
    ),
    "mem-sgd-topk": (
        averaged("topk", "fp32", True, None, fraction=_K),
        "top-k with residual up, uncompressed down (DoubleSqueeze §5.1)",
    ),
    "topk-sgd": (
        averaged("topk", "fp32", False, None, fraction=_K),
        "top-k up without residual, uncompressed down (DoubleSqueeze §5.1)",
    ),
    "entropy": (_entropy, "whole weights after each epoch, adaptive bits and Huffman code (Øland & Raj §2, §4)"),
    "mps": (_mps, "heuristic placement, passive SSP 5, top 1 % with residual (Wu 2018, ch. 4–5)"),
    **{name: (_local(kind), kind.about) for name, kind in LOCAL_KINDS.items()},
}
"""Id → what makes the fields of its `Design` from options, and what it is."""
