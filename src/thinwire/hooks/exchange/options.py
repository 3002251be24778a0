"""The arguments of `compress`, their checks, and the exchange that every hook builds from them.

Each hook finds its tensors and receives gradients in its own way. The choice of codecs, the connections, the settings
that ranks must share and the construction of the exchange are the same for all hooks, and are in this file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from math import prod
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from thinwire.cautions import caution
from thinwire.codecs import Codec
from thinwire.collective.core import Collective
from thinwire.collective.residuals import Residuals
from thinwire.collective.trained import Partitions, TrainedTensor
from thinwire.errors import ConfigError
from thinwire.hooks.exchange.ranks import described, meet, timeout_of
from thinwire.policies.adaptive import takes_few_bits
from thinwire.policies.auto.levels import AUTO, Level, Limits, Target, residual_codec
from thinwire.policies.compression import MIN_NUMEL, PLAIN, ByShape, Choice, Compression, Exclude, as_codec, select
from thinwire.runtime.clock import check_seconds, in_seconds
from thinwire.runtime.peers import agree
from thinwire.schema import Reduce
from thinwire.security.credentials import Credentials
from thinwire.transports.peers import PeerGroup
from thinwire.version import VERSION

GATHER_MB = 4.0
"""Every group of buckets costs two packets to every rank, which soon cost more time than earlier sending saves."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """The keyword arguments of `ddp.compress`, `fsdp.compress` and `named.compress`, besides the model.

    `compress(model, "3lc", sparsity=1.0, start_step=50)` sets `start_step` here and passes `sparsity` to the codec.

    Args:
        codec: of every rank's gradient: an id, or a codec. With `"auto"` (DDP and FSDP2) a controller measures the link
            and the training, and chooses for every step: uncompressed, bf16, int8, or 3LC with some s.
        options: of the codec, if `codec` is an id. `compress` accepts them by name.
        codec_down: of the averages; by default the same. FSDP2 without replicas sends no averages.
        start_step: steps before it are exchanged uncompressed. Not of `named.compress`.
        min_numel: tensors with fewer values are not compressed, nor are biases and norm layers.
        exclude: further tensors to leave uncompressed, by name and shape.
        codecs: other codecs by patterns of tensor names (as in `"fc*.weight"`); the first match wins.
        last_layer: another codec for the last layer's tensors, such as `"fp32"`. Not of `named.compress`.
        compression: a policy in place of `codec`, `codec_down`, `min_numel` and `exclude`; `codecs` and `last_layer`
            override it. Not of `named.compress`.
        reduce: the mean over the ranks or their sum. FSDP2 supports only the mean.
        nonfinite: the effect of NaN or Inf on any rank: `"raise"` ends the training on all ranks; `"skip"` gives every
            rank averages with NaN or Inf and leaves every residual unchanged, so that a GradScaler skips the step on
            all ranks. With a fixed codec, torch exchanges steps before `start_step`, without this check.
        scaler: the training loop's GradScaler; residuals then follow its scale. It needs `nonfinite="skip"`.
        seed: of random codecs.
        timeout: how long a rank may delay the other ranks, in seconds or as a timedelta; by default the timeout of the
            process group.
        gather_mb: buckets are sent together until they have this many megabytes; 0 sends each separately.
        measure_link: sends a few messages at the start (some 0.1 s), so that the report can judge whether it pays.
        credentials: with a token file, messages between ranks are sealed with its first token without a rank, the same
            on all ranks: a reader on the network can neither read nor change them.
        lag_limit: of `"auto"`: the most steps that a residual may withhold; by default 5.
        target: of `"auto"`: the quantity to minimise, the `"time"` of a step (the default) or `"bytes"`.

    Raises:
        ConfigError: an invalid value.
    """

    codec: str | Codec = "3lc"
    options: Mapping[str, Any] = field(default_factory=dict)
    codec_down: str | Codec | None = None
    start_step: int = 0
    min_numel: int = MIN_NUMEL
    exclude: Exclude | None = None
    codecs: Mapping[str, str | Codec] | None = None
    last_layer: str | Codec | None = None
    compression: Compression | None = None
    reduce: Reduce = "mean"
    nonfinite: Literal["raise", "skip"] = "raise"
    scaler: Any = None
    seed: int = 0
    timeout: float | timedelta | None = None
    gather_mb: float = GATHER_MB
    measure_link: bool = True
    credentials: Credentials | None = None
    lag_limit: float | None = None
    target: Target | None = None

    @classmethod
    def of(cls, codec: str | Codec, given: Mapping[str, Any], without: Collection[str] = ()) -> ExchangeOptions:
        """Returns the options from the keyword arguments of `compress`; unknown ones belong to the codec.

        Args:
            codec: as the user gave it.
            given: the keyword arguments.
            without: fields that this hook does not accept.

        Raises:
            ConfigError: an invalid value, or a name that neither `compress` nor the codec knows.
        """
        taken = [each.name for each in fields(cls) if each.name not in ("codec", "options", *without)]
        options = {name: value for name, value in given.items() if name not in taken}
        asked = cls(codec=codec, options=options, **{name: given[name] for name in taken if name in given})
        if (reduce := given.get("reduce", "mean")) not in ("mean", "sum"):
            raise ConfigError(f"reduce={reduce!r}; allowed is 'mean' or 'sum'")
        if options and codec != AUTO:
            try:
                as_codec(codec, options)
            except ConfigError as error:
                if "option" not in str(error):  # an invalid value
                    raise
                raise ConfigError(f"{error}; compress itself takes {', '.join(taken)}") from error
        return asked

    def __post_init__(self) -> None:
        given: dict[str, Any] = vars(self)  # from a script, which may ignore the types

        def check(name: str, fits: bool, allowed: str) -> None:
            if not fits:
                raise ConfigError(f"{name}={given[name]!r}; allowed is {allowed}")

        for name in ("start_step", "min_numel", "seed"):
            whole = isinstance(given[name], int | np.integer) and not isinstance(given[name], bool)
            check(name, whole and (name == "seed" or given[name] >= 0), "a whole number, but for a seed 0 or more")
        check("reduce", given["reduce"] in get_args(Reduce), "'mean' or 'sum'")
        check("nonfinite", given["nonfinite"] in ("raise", "skip"), "'raise' or 'skip'")
        check("measure_link", isinstance(given["measure_link"], bool), "True or False")
        policy, timeout, mb = given["compression"], given["timeout"], given["gather_mb"]
        check(
            "compression", policy is None or hasattr(policy, "choose"), "a policy, such as policies.compression.ByShape"
        )
        check("credentials", isinstance(given["credentials"], Credentials | None), "tw.Credentials(token_file=…)")
        check("gather_mb", isinstance(mb, int | float) and 0 <= mb < float("inf"), "a number of megabytes, 0 or more")
        if timeout is not None:
            check_seconds(timeout=in_seconds(timeout))
            check("timeout", in_seconds(timeout) > 0, "a number of seconds or a timedelta above 0")
        if self.scaler is not None and self.nonfinite != "skip":
            raise ConfigError("a GradScaler finds its scale by steps that overflow; with scaler, set nonfinite='skip'")

    @property
    def group_nbytes(self) -> int:
        """Buckets are sent together until their gradients have this many bytes."""
        return int(self.gather_mb * 1e6)

    # ---- codecs

    def settings(self, devices: Collection[torch.device]) -> tuple[Level, ...]:
        """Returns the settings that `codec="auto"` chooses from, uncompressed first; none for any other codec.

        Args:
            devices: of the gradients.

        Raises:
            ConfigError: contradictory or invalid arguments.
        """
        if self.codec != AUTO:
            if self._asked:
                raise ConfigError(
                    f"only codec='auto' takes {' and '.join(self._asked)}, and codec is {self.codec!r}; a fixed codec "
                    "has its own limit, as in compress(model, '3lc', sparsity=1.75, lag=5)"
                )
            return ()
        replaced = (("codec_down", self.codec_down), ("compression", self.compression))
        if what := [*self.options, *(name for name, value in replaced if value is not None)]:
            raise ConfigError(
                f"codec='auto' decides both ways and all options itself; leave out {', '.join(what)}, or name a codec"
            )
        return self.limits.levels(devices)

    @property
    def _asked(self) -> dict[str, Any]:
        """The controller's arguments that were given; `Limits` has the defaults of the rest."""
        asked = {"lag_limit": self.lag_limit, "target": self.target}
        return {name: value for name, value in asked.items() if value is not None}

    @property
    def limits(self) -> Limits:
        """The limits of the controller of `codec="auto"`."""
        return Limits(**self._asked)

    def choices(self, shapes: Mapping[str, tuple[int, ...]], settings: tuple[Level, ...] = ()) -> dict[str, Choice]:
        """Returns every tensor's codecs. The codecs refuse NaN and Inf, and the hook decides what follows.

        Args:
            shapes: of the tensors, by name, in the model's order.
            settings: of `codec="auto"`; none with a fixed codec.

        Raises:
            ConfigError: invalid codecs or options.
        """
        codec = residual_codec(settings) if settings else as_codec(self.codec, dict(self.options))
        compression = self.compression
        if compression is None:
            down = codec if self.codec_down is None else as_codec(self.codec_down, {})
            compression = ByShape(up=codec, down=down, min_numel=self.min_numel, exclude=self.exclude)
        chosen = select(shapes, compression, codecs=self.codecs, last_layer=self.last_layer)
        if codec != PLAIN and all(each == Choice(PLAIN, PLAIN) for each in chosen.values()):
            small = sum(len(shape) > 1 and prod(shape) < self.min_numel for shape in shapes.values())
            caution(
                f"nothing is compressed: all {len(shapes)} tensors travel as float32, {small} of them because they "
                f"have fewer than min_numel={self.min_numel} values, the others as biases, norm layers or exclusions"
            )
        return {
            name: Choice(replace(each.up, nonfinite="raise"), replace(each.down, nonfinite="raise"))
            for name, each in chosen.items()
        }

    # ---- ranks

    def meet(self, ranks: Sequence[int], group: dist.ProcessGroup) -> PeerGroup:
        """Returns connections to these ranks, as `ranks.meet`; the default timeout is the training group's."""
        timeout = timeout_of(group) if self.timeout is None else timedelta(seconds=in_seconds(self.timeout))
        return meet(ranks, timeout, self.credentials)

    def agree(self, peers: PeerGroup, tensors: Sequence[TrainedTensor], own: Mapping[str, Any]) -> None:
        """Compares settings and tensors with rank 0's, as `runtime.peers.agree`.

        Args:
            peers: all ranks of the training.
            tensors: of the model, whole.
            own: further settings of this hook, JSON values by name.
        """
        shared = {
            "thinwire": VERSION,
            "codec": self.agreement(()),
            "start_step": self.start_step,
            "reduce": self.reduce,
            "nonfinite": self.nonfinite,
            "scaler": None if self.scaler is None else "given",
            "gather_mb": self.group_nbytes / 1e6,
            "measure_link": self.measure_link,
        }
        agree(peers, {**shared, **own, **described(tensors)})

    def agreement(self, settings: tuple[Level, ...]) -> dict[str, Any]:
        """Returns the codec's id or the controller's settings, which all ranks must share, as JSON values.

        If only some ranks have a controller, the message names just the `id`.
        """
        if not settings:
            return {"id": self.codec if isinstance(self.codec, str) else self.codec.id}
        auto = self.limits
        names = [level.name for level in settings]
        return {"id": AUTO, "lag_limit": float(auto.lag_limit), "target": auto.target, "settings": names}

    # ---- the exchange

    def core(
        self,
        tensors: Sequence[TrainedTensor],
        peers: PeerGroup,
        *,
        partitions: Partitions | None = None,
        drop_zeros: bool = False,
        pulls: bool = True,
    ) -> Collective:
        """Returns this rank's part in the exchange, with empty residuals.

        Args:
            tensors: that these ranks exchange.
            peers: the ranks.
            partitions: the owners of the values; by default all ranks own equally many.
            drop_zeros, pulls: of `Collective`.
        """
        mean = self.reduce != "sum"
        residuals = Residuals(
            tensors,
            peers.rank,
            peers.size,
            mean=mean,
            seed=self.seed,
            partitions=partitions,
            of_senders="senders" in self.reduce,
        )
        return Collective(
            residuals,
            skip=self.nonfinite == "skip",
            drop_zeros=drop_zeros,
            group_nbytes=self.group_nbytes,
            pulls=pulls,
            names=peers.names,
            clip=self.reduce.startswith("clipped"),
        )

    def few_bits(self, choices: Mapping[str, Choice], settings: tuple[Level, ...], rank: int) -> str:
        """Returns, on rank 0, the fixed codec as text if it needs fewer than 8 bits a value; else an empty text."""
        found = {str(each.up): None for each in choices.values() if takes_few_bits(each.up)}
        return "" if settings or rank or not found else ", ".join(found)
