"""Designs: complete configurations that a study compares, by name, as in `3lc[s=1.75]`.

A design is a frozen value; every choice in it may be replaced (`dataclasses.replace`, `tw.distribute(…)`'s arguments,
`thinwire train --consistency …`), and its policies in its name, as in `3lc[consistency=ssp[5]]`. Combinations that
cannot work are refused here, with the reason. The designs themselves are in `shipped`, and other packages bring theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from thinwire.codecs import Codec
from thinwire.codecs.levels import Votes
from thinwire.codecs.stochastic import TernGrad
from thinwire.errors import ConfigError, guess
from thinwire.extras import in_lab
from thinwire.names import parse_name
from thinwire.plugins import load, load_or_warn
from thinwire.policies.compression import MIN_NUMEL, Compression, Exclude, check_pull_codec
from thinwire.policies.compression import compression as find_compression
from thinwire.policies.consistency import Consistency, consistency
from thinwire.policies.local_updates import LocalUpdates
from thinwire.policies.naming import plugins
from thinwire.policies.placement import placement
from thinwire.policies.shipped import SHIPPED
from thinwire.schema import Reduce

_POLICIES = ("consistency", "placement", "compression", "transmission")
"""Fields that a design's name may replace, in brackets."""

Downlink = Literal["delta", "gradient", "weights"]
_ALLOWED: dict[str, tuple[str, ...]] = {
    "downlink": get_args(Downlink),
    "transmission": ("wait-free", "traditional"),
    "last_layer": ("same", "fp32"),
    "reduce": get_args(Reduce),
}


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
    every: Literal["step", "epoch"] = "step"
    digest_every: int = 0
    ema: float = 0.0
    local: LocalUpdates | None = None
    reduce: Reduce = "mean"
    cite: str = ""

    def __post_init__(self) -> None:
        placement(self.placement)
        self.compress()
        for field, allowed in _ALLOWED.items():
            if (chosen := getattr(self, field)) not in allowed:
                raise ConfigError(f"{field} {chosen!r}; there are {', '.join(allowed)}")
        check_pull_codec(self.down, self.name)
        for reason in self._conflicts(consistency(self.consistency)):
            raise ConfigError(reason)

    def _conflicts(self, policy: Consistency) -> Iterator[str]:
        """Yields why choices do not go together."""
        up, weights, local = self.up.scheme, self.downlink == "weights", self.local
        if policy.decoupled and (local is None or not local.quorum):
            yield f"{policy.id} merges what learners change in inner steps: take a design such as decoupled[h=24]"
        if local is not None and local.quorum and self.down.random:
            yield (
                f"{self.down.id!r} draws random numbers on pulls: all learners continue from what a pull leaves out: "
                "learners that never wait need a deterministic codec_down, such as '3lc'"
            )
        if self.downlink != "delta" and policy.immediate:
            yield f"{policy.id} applies each push to the server's model, and with downlink={self.downlink} it has none"
        residuals = self.up.residual_by_default or self.down.residual_by_default
        early, some = self.transmission == "wait-free", policy.quorum(8) < 8 or policy.criterion() is not None
        if weights and (early or some or residuals):
            yield (
                "with downlink=weights every worker sends what its steps have made of its weights: that needs "
                "transmission=traditional (overlap=False), codecs without a residual (error_feedback=false), and a "
                f"consistency that takes the weights of all workers; here are transmission={self.transmission}, "
                f"{self.up}, {self.down} and {self.consistency}"
            )
        if self.downlink == "delta" and self.down.error_scale != 1:
            yield (
                f"the pulls' error_scale is {self.down.error_scale:g}, and with downlink=delta nothing is multiplied "
                "by it: what a pull leaves out is what the model is ahead of the workers' copy; leave it at 1"
            )
        trits = isinstance(up, TernGrad) and up.scale is None and self.down.scheme == Votes()
        if self.share_scales and (early or not trits or self.downlink != "gradient" or policy.id != "bsp"):
            yield (
                "votes are counted trits of one scale, the largest of all workers', which takes a round trip at the "
                "end of backward: they need terngrad without a scale, votes without options, downlink=gradient, bsp "
                f"and transmission=traditional; here are {self.up}, {self.down}, downlink={self.downlink}, "
                f"{self.consistency} and transmission={self.transmission}"
            )
        if local is not None and (self.downlink != "delta" or self.consistency != local.consistency):
            yield (
                f"design {self.name!r} trains locally for {local.h} steps: its consistency is "
                f"{local.consistency} and its downlink delta; {self.consistency} and {self.downlink} were given"
            )
        if local is not None and self.ema:
            yield "ema averages the weights of all steps, and with local updates each worker has its own"
        means = {"downlink=weights": weights, "votes": self.share_scales, "steer": local is not None and local.steer}
        if self.reduce == "sum" and (of := [name for name, given in means.items() if given]):
            yield (
                f"reduce='sum' with {of[0]}, which is about the mean of what all workers have; use reduce='mean', and "
                "a learning rate that is larger by the number of workers"
            )
        if self.reduce not in ("mean", "sum") and not up.sends_some:
            yield (
                f"reduce={self.reduce!r} is of codecs that send some of the values (blocktopk, topk); the "
                f"pushes are {self.up.id}, which sends all of them: use reduce='mean'"
            )

    @property
    def share_scales(self) -> bool:
        """Whether all workers encode with the largest of their scales, for votes: one more round trip a step."""
        return isinstance(self.down.scheme, Votes)

    def compress(self, exclude: Exclude | None = None) -> Compression:
        """Returns the policy that decides for each tensor.

        Args:
            exclude: tensors to leave uncompressed besides, by name and shape.
        """
        return find_compression(self.compression, up=self.up, down=self.down, min_numel=self.min_numel, exclude=exclude)

    def choosing(self, policy: Compression | None = None, exclude: Exclude | None = None) -> dict[str, Any]:
        """Returns what gives each tensor its codecs, as `select` and hooks take it.

        Args:
            policy: in place of the design's, which has the last layer as an exception.
            exclude: tensors to leave uncompressed besides the design's.
        """
        if policy is not None:
            return {"compression": policy, "last_layer": None}
        last_layer = "fp32" if self.last_layer == "fp32" else None
        return {"compression": self.compress(exclude), "last_layer": last_layer}

    @property
    def sends_early(self) -> bool:
        """Whether gradients leave during the backward pass, so that the script cannot clip them after it.

        Example:
            >>> [design(name).sends_early for name in ("3lc", "3lc[transmission=traditional]", "update")]
            [True, False, False]
        """
        return self.local is None and self.transmission == "wait-free"

    def with_epoch(self, steps: int) -> Design:
        """Returns the design with its exchanges counted in steps.

        Args:
            steps: that every worker takes in an epoch.

        Example:
            >>> design("entropy").with_epoch(steps=40).consistency
            'local[steps=40]'
        """
        return self if self.every == "step" else replace(self, every="step", consistency=f"local[steps={steps}]")

    def check_counts_steps(self) -> None:
        """Raises ConfigError where the design exchanges once an epoch, and does not say how many steps that is."""
        if self.every != "step":
            steps = "consistency='local[steps=100]'"
            raise ConfigError(
                f"design {self.name!r} exchanges once an epoch: give {steps}, with the number of steps that every "
                "worker takes in an epoch"
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


def designs() -> dict[str, str]:
    """Returns the ids of all designs, with what each is: ours, and those of other packages (`thinwire.designs`)."""
    found = {name: about for name, (_, about) in SHIPPED.items()}
    for point in plugins("thinwire.designs"):
        made = load_or_warn(point)
        about = (made is not None and made.__doc__) or f"from {point.value}"
        found.setdefault(point.name, about.partition("\n")[0])
    return found


def design(name: str | Design, **replacements: Any) -> Design:
    """Returns a design by name; options in brackets go to its codec, `s` is short for `sparsity`.

    `consistency`, `placement`, `compression` and `transmission` in brackets replace the design's own choice.

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
        >>> made = design("mps[fraction=0.02,consistency=bsp,transmission=traditional]")
        >>> made.up.config()["fraction"], made.consistency, made.transmission
        (0.02, 'bsp', 'traditional')
    """
    made = name if isinstance(name, Design) else _make(name)
    return _replace(made, {key: value for key, value in replacements.items() if value is not None})


def _replace(made: Design, given: dict[str, Any]) -> Design:
    """Returns the design with other choices; one that is given its consistency counts its exchanges by it."""
    return replace(made, **({"every": "step"} if "consistency" in given else {}) | given)


def _make(name: str) -> Design:
    design_id, options = parse_name(name, "design")
    policies = {key: options.pop(key) for key in _POLICIES if key in options}
    try:
        if design_id in SHIPPED:
            make, about = SHIPPED[design_id]
            return _replace(Design(name=name, cite=about, **make(**options)), policies)
        for point in plugins("thinwire.designs"):
            if point.name == design_id:
                found = load(point)(**options)
                if not isinstance(found, Design):
                    raise ConfigError(f"{point.value} returned {found!r:.80}, which is no Design")
                return _replace(replace(found, name=name), policies)
    except (TypeError, ConfigError) as error:
        raise ConfigError(f"design {name!r}: {error}") from error
    if design_id == "auto":
        raise ConfigError("'auto' is no design: tw.distribute(model, optimizer) chooses one when a training begins")
    if absent := in_lab("design", design_id):
        raise absent
    raise ConfigError(f"unknown design {design_id!r}{guess(design_id, designs())}; there are {', '.join(designs())}")
