"""Designs: complete configurations that a study compares, by name, as in `3lc[s=1.75]`.

A design is a frozen value; every choice in it may be replaced (`dataclasses.replace`, `tw.distribute(…)`'s arguments,
`thinwire train --consistency …`). Combinations that cannot work are refused here, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from thinwire.codecs import Codec
from thinwire.codecs.levels import Votes
from thinwire.codecs.registry import codec
from thinwire.codecs.stochastic import TernGrad
from thinwire.errors import ConfigError
from thinwire.policies.compression import MIN_NUMEL, Compression, Exclude, check_pull_codec, codec_by_name
from thinwire.policies.compression import compression as find_compression
from thinwire.policies.consistency import consistency
from thinwire.policies.local_updates import KINDS as LOCAL_KINDS
from thinwire.policies.local_updates import OPTIONS, Kind, LocalUpdates, split_options
from thinwire.policies.naming import parse_name, plugins
from thinwire.policies.placement import placement
from thinwire.schema import Reduce

Downlink = Literal["delta", "gradient", "weights"]


@dataclass(frozen=True, kw_only=True)
class Design:
    """One way to train.

    Args:
        name: as the user wrote it, options included.
        up: codec of the pushes.
        down: codec of the pulls.
        downlink: what travels down: the change of the server's model (`delta`), the average gradient for workers that
            run the optimizer (`gradient`), or the average of the workers' weights (`weights`).
        consistency: name of the policy, as in `ssp[staleness=5]`.
        placement: name of the policy, as in `uniform[min=1024]`.
        compression: name of the policy that gives each tensor its codecs, `up` and `down` or others.
        transmission: `wait-free` pushes and pulls layer by layer, `traditional` everything at the end of the step.
        min_numel: tensors with fewer values travel uncompressed, as do biases and norm layers.
        last_layer: `fp32` leaves the last layer's weights uncompressed.
        share_scales: every tensor is encoded with the largest of all workers' scales (one more round trip a step).
        every: `epoch` where workers exchange once an epoch; `consistency` says it in steps once that is known, see
            `with_epoch`.
        digest_every: replicas are compared by hash every so many steps; 0: never.
        ema: decay of the moving average of the weights, for evaluation (`opt.averaged_weights()`); 0: none.
        local: workers run their own optimizer for H steps, and what that changed is pushed in place of gradients.
        reduce: the mean over the gradients that came, or their sum. Of codecs that send some of the values also
            `mean-of-senders`, each value's mean over those who sent it, and `clipped-mean-of-senders`, in which every
            worker's message is first scaled down to the median of their norms, table by table.
        cite: what it is, and where it comes from.

    Raises:
        ConfigError: choices that do not go together, with the reason.
    """

    name: str
    up: Codec
    down: Codec
    downlink: Downlink = "delta"
    consistency: str = "bsp"
    placement: str = "heuristic"
    compression: str = "by-shape"
    transmission: Literal["wait-free", "traditional"] = "wait-free"
    min_numel: int = MIN_NUMEL
    last_layer: Literal["same", "fp32"] = "same"
    share_scales: bool = False
    every: Literal["step", "epoch"] = "step"
    digest_every: int = 0
    ema: float = 0.0
    local: LocalUpdates | None = None
    reduce: Reduce = "mean"
    cite: str = ""

    def __post_init__(self) -> None:
        policy = consistency(self.consistency)
        placement(self.placement)
        self.compress()
        if self.downlink not in ("delta", "gradient", "weights"):
            raise ConfigError(f"downlink {self.downlink!r}; there are delta, gradient and weights")
        if self.transmission not in ("wait-free", "traditional"):
            raise ConfigError(f"transmission {self.transmission!r}; there are wait-free and traditional")
        check_pull_codec(self.down, self.name)
        if self.downlink != "delta" and policy.immediate:
            raise ConfigError(
                f"{policy.id} applies each push to the server's model, and with downlink={self.downlink} it has none"
            )
        if self.downlink == "weights" and policy.quorum(8) < 8:
            raise ConfigError("an average of weights needs every worker's; backup workers would drop some")
        if self.downlink == "weights" and (self.up.residual_by_default or self.down.residual_by_default):
            raise ConfigError("whole weights carry no residual; use error_feedback=false with downlink=weights")
        if isinstance(self.down.scheme, Votes) and not (self.downlink == "gradient" and self.share_scales):
            raise ConfigError("votes are counted trits of one scale: they need downlink=gradient and share_scales")
        if self.share_scales and not isinstance(self.up.scheme, TernGrad):
            raise ConfigError(f"scales are shared by terngrad alone; the pushes are {self.up.id}")
        if self.share_scales and (self.transmission == "wait-free" or policy.id != "bsp"):
            raise ConfigError(
                "sharing scales is a round trip of all workers at the end of backward: it needs bsp and "
                "transmission=traditional"
            )
        if self.local is not None and (self.downlink != "delta" or self.consistency != self.local.consistency):
            raise ConfigError(
                f"design {self.name!r} trains locally for {self.local.sync_every} steps: its consistency is "
                f"{self.local.consistency} and its downlink delta; {self.consistency} and {self.downlink} were given"
            )
        self._check_reduce()
        if policy.criterion() is not None and self.downlink == "weights":
            raise ConfigError("adaptive communication accumulates gradients; whole weights cannot be accumulated")

    def compress(self, exclude: Exclude | None = None) -> Compression:
        """Returns the policy that decides for each tensor.

        Args:
            exclude: tensors to leave uncompressed besides, by name and shape.
        """
        return find_compression(self.compression, up=self.up, down=self.down, min_numel=self.min_numel, exclude=exclude)

    def with_epoch(self, steps: int | None) -> Design:
        """Returns the design with its exchanges counted in steps.

        Args:
            steps: that every worker takes in an epoch.

        Raises:
            ConfigError: the design exchanges once an epoch, and `steps` is None.

        Example:
            >>> design("entropy").with_epoch(steps=40).consistency
            'local[steps=40]'
        """
        if self.every == "step":
            return self
        if steps is None:
            raise ConfigError(
                f"design {self.name!r} exchanges once an epoch: pass steps_per_epoch=…, the number of steps that every "
                "worker takes in an epoch (or a consistency of your own, such as 'local[steps=100]')"
            )
        return replace(self, every="step", consistency=f"local[steps={steps}]")

    def _check_reduce(self) -> None:
        if self.reduce not in get_args(Reduce):
            raise ConfigError(f"reduce={self.reduce!r}; there are {', '.join(get_args(Reduce))}")
        if self.reduce == "sum" and self.downlink == "weights":
            raise ConfigError(
                "reduce='sum' with downlink=weights: the sum of the workers' weights is no model; use reduce='mean'"
            )
        if self.reduce == "sum" and isinstance(self.down.scheme, Votes):
            raise ConfigError(
                "reduce='sum' with votes: votes are counted and their mean is what travels; use reduce='mean', and a "
                "learning rate that is larger by the number of workers"
            )
        if self.reduce not in ("mean", "sum") and not self.up.scheme.sends_some:
            raise ConfigError(
                f"reduce={self.reduce!r} is of codecs that send some of the values (blocktopk, topk, threshold); the "
                f"pushes are {self.up.id}, which sends all of them: use reduce='mean'"
            )

    def choices(self) -> dict[str, Any]:
        """Returns every choice spelled out, as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in values.items():
            if isinstance(value, Codec):
                values[name] = value.config()
            elif isinstance(value, LocalUpdates):
                values[name] = asdict(value)
        return values


def _both(codec_id: str, **fixed: Any) -> Callable[..., dict[str, Any]]:
    """The same codec both ways; options go to it."""

    def make(**options: Any) -> dict[str, Any]:
        made = codec(codec_id, **{**fixed, **options})
        return {"up": made, "down": made}

    return make


def _average(
    up: str, down: str, up_feedback: bool, down_feedback: bool | None, **fixed: Any
) -> Callable[..., dict[str, Any]]:
    """Workers run the optimizer on the average gradient; options go to the codec of the pushes."""

    def make(**options: Any) -> dict[str, Any]:
        chosen = {**fixed, **options}
        return {
            "up": codec(up, error_feedback=up_feedback, **chosen),
            "down": codec(down, error_feedback=down_feedback, **(chosen if down == up else {})),
            "downlink": "gradient",
        }

    return make


def _local2(steps: int = 2) -> dict[str, Any]:
    return {**_both("fp32")(), "consistency": f"local[steps={steps}]"}


def _terngrad(ema: float = 0.0, **options: Any) -> dict[str, Any]:
    return {
        "up": codec("terngrad", **options),
        "down": codec("votes"),
        "downlink": "gradient",
        "share_scales": True,
        "transmission": "traditional",
        "last_layer": "fp32",
        "digest_every": 100,
        "ema": ema,
    }


def _entropy(**options: Any) -> dict[str, Any]:
    made = codec("entropy", error_feedback=False, **options)
    return {"up": made, "down": made, "downlink": "weights", "every": "epoch", "transmission": "traditional"}


def _mps(staleness: int = 5, fraction: float = 0.01, **options: Any) -> dict[str, Any]:
    return {
        "up": codec("topk", fraction=fraction, error_feedback=True, **options),
        "down": codec("topk", fraction=0.01, error_feedback=True),
        "consistency": f"ssp[staleness={staleness},mode=passive]",
    }


def _local(kind: Kind) -> Callable[..., dict[str, Any]]:
    """Workers run their own optimizer; options are of the local updates, `codec`, `codec_down`, and the codec's own.

    Norms and biases of transformers are a quarter of what `update` would send with float32 in place of `small`.
    """

    def make(
        codec: str | None = None,
        codec_down: str | None = None,
        reduce: Reduce = kind.reduce,
        small: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        timetable, own = split_options(options)
        _check_options(codec or kind.codec, own)
        local = replace(kind.updates, **timetable)
        up = {"nonfinite": "skip", **({} if codec else kind.options), **own}
        down_codec = codec_down or (None if codec else kind.down)
        down = {**up, **({} if codec else kind.down_options), **own}
        down = {key: value for key, value in down.items() if key not in ("nonfinite", "error_scale")}
        pushes = codec_by_name(codec or kind.codec, **up)
        if small is None:
            small = "fp32" if pushes.id == "fp32" else "bf16"
        return {
            "up": pushes,
            "down": codec_by_name(down_codec) if down_codec else codec_by_name(codec or kind.codec, **down),
            "compression": f"by-shape[small={small}]",
            "local": local,
            "consistency": local.consistency,
            "reduce": reduce,
        }

    return make


def _check_options(of: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that neither local updates nor their codec, by name, have."""
    codec_id = parse_name(of, "codec", short={"s": "sparsity"})[0]
    known = [name for name in codec(codec_id).config() if name != "id"]
    if unknown := [name for name in given if name not in known]:
        raise ConfigError(
            f"unknown option {unknown[0]!r}; local updates have {', '.join(OPTIONS)}, codec, codec_down, small and "
            f"reduce, and their codec {codec_id} has {', '.join(known)}"
        )


_K = 1 / 32
"""DoubleSqueeze's k: 300,000 values, about 1/32 of the parameters (§5.2)."""

_SHIPPED: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "fp32": (_both("fp32"), "no compression (3LC §4.2, 32-bit float)"),
    "fp16": (_both("fp16"), "half precision both ways"),
    "bf16": (_both("bf16"), "bfloat16 both ways"),
    "int8": (_both("int8"), "255 levels (3LC §4.2, 8-bit int)"),
    "stoch3": (_both("stoch3"), "stochastic ternary in base-3⁵, no residual (3LC §4.2, Stoch 3-value)"),
    "mqe1": (_both("mqe1"), "1 bit, least squared error, residual (3LC §4.2, MQE 1-bit int)"),
    "sparse5": (
        _both("threshold", fraction=0.05, error_feedback=True),
        "5 % of each tensor by a sampled threshold, residual (3LC §4.2, 5 % sparsification)",
    ),
    "local2": (_local2, "transmit every 2nd step what accumulated (3LC §4.2, 2 local steps)"),
    "3lc": (_both("3lc"), "3-value quantisation with sparsity multiplication, base-3⁵, zero runs, residuals (3LC §3)"),
    "terngrad": (_terngrad, "clipped stochastic ternary up with shared scalars, exact votes down (TernGrad §3)"),
    "doublesqueeze-1bit": (
        _average("onebit", "onebit", True, True),
        "1 bit both passes, residual on both (DoubleSqueeze algorithm 1, §5.1)",
    ),
    "doublesqueeze-topk": (
        _average("topk", "topk", True, True, fraction=_K),
        "top-k both passes, residual on both (DoubleSqueeze §5.1)",
    ),
    "mem-sgd-1bit": (
        _average("onebit", "fp32", True, None),
        "1 bit with residual up, uncompressed down (DoubleSqueeze §5.1)",
    ),
    "mem-sgd-topk": (
        _average("topk", "fp32", True, None, fraction=_K),
        "top-k with residual up, uncompressed down (DoubleSqueeze §5.1)",
    ),
    "topk-sgd": (
        _average("topk", "fp32", False, None, fraction=_K),
        "top-k up without residual, uncompressed down (DoubleSqueeze §5.1)",
    ),
    "qsgd-ds": (
        _average("qsgd-ds", "fp32", False, None),
        "DoubleSqueeze's biased ternary up, uncompressed down (DoubleSqueeze §5.1, QSGD)",
    ),
    "entropy": (_entropy, "whole weights after each epoch, adaptive bits and Huffman code (Øland & Raj §2, §4)"),
    "mps": (_mps, "heuristic placement, passive SSP 5, top 1 % with residual (Wu 2018, ch. 4–5)"),
    **{name: (_local(kind), kind.about) for name, kind in LOCAL_KINDS.items()},
}


def designs() -> dict[str, str]:
    """Returns the ids of all designs, with what each is: ours, and those of other packages (`thinwire.designs`)."""
    found = {name: about for name, (_, about) in _SHIPPED.items()}
    for point in plugins("thinwire.designs"):
        found.setdefault(point.name, f"from {point.value}")
    return found


def design(name: str | Design, **replacements: Any) -> Design:
    """Returns a design by name; options in brackets go to its codec, `s` is short for `sparsity`.

    Args:
        name: as in `3lc[s=1.75,entropy=zstd]`; a Design is taken as it is.
        **replacements: fields to replace, where not None: `consistency="ssp[5]"`, …; that replaces `every`, too.

    Raises:
        ConfigError: an unknown design or option, or choices that do not go together.

    Example:
        >>> design("3lc[s=1.75,entropy=zstd]").up.config()["sparsity"]
        1.75
        >>> design("3lc", consistency="backup[1]").consistency
        'backup[1]'
    """
    made = name if isinstance(name, Design) else _make(name)
    given = {key: value for key, value in replacements.items() if value is not None}
    if "consistency" in given:
        given.setdefault("every", "step")
    return replace(made, **given)


def _make(name: str) -> Design:
    design_id, options = parse_name(name, "design", short={"s": "sparsity"})
    if design_id in _SHIPPED:
        make, about = _SHIPPED[design_id]
        try:
            return Design(name=name, cite=about, **make(**options))
        except (TypeError, ConfigError) as error:
            raise ConfigError(f"design {name!r}: {error}") from error
    for point in plugins("thinwire.designs"):
        if point.name == design_id:
            found: Design = point.load()(**options)
            return found
    raise ConfigError(f"unknown design {design_id!r}; there are {', '.join(designs())}")
