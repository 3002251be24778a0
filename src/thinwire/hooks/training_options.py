"""The keyword arguments of `tw.distribute` that most scripts leave out, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from thinwire.codecs import Codec
from thinwire.errors import ConfigError
from thinwire.policies.auto.levels import AUTO
from thinwire.policies.compression import Compression, Exclude, as_codec
from thinwire.policies.designs import Design
from thinwire.policies.designs import design as find_design
from thinwire.runtime.clock import check_seconds, in_seconds
from thinwire.schema import Reduce
from thinwire.security import Credentials
from thinwire.worker.transmit_buffer import CHUNK_NBYTES


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The keyword arguments of `tw.distribute` beyond its signature; all further ones belong to the codec.

    Args:
        codec_down: as of `ExchangeOptions`; None: the design's.
        min_numel: as of `ExchangeOptions`; None: the design's.
        exclude: as of `ExchangeOptions`; None: the design's.
        seed: as of `ExchangeOptions`.
        compression: chooses each tensor's codec: a policy's name, or a policy that replaces codecs, `min_numel` and
            `exclude`.
        reduce: `mean` over the received gradients, or their `sum` (not if servers send weights or votes); see `Design`
            for the means over the senders of a value. By default the design's, which is the mean for most.
        overlap: False pushes and pulls at `step()`, so that gradients can be clipped between backward and step.
            Otherwise gradients are sent during backward, and `step()` refuses gradients that were changed since.
        timeout: how long the slowest worker may delay the others, in seconds or as a timedelta.
        credentials: this worker's certificate and token, and the authority that it trusts; None: without encryption.
            In a group messages are sealed with the first token without a rank.
        connect_timeout_s: how long to wait for a server at first, in seconds.
        reconnect_s: how long to try to replace a broken connection to a server, in seconds; 0: not.
        state_interval: number of steps between updates of all workers' batch-norm statistics from worker 0, with
            servers.
        chunk_nbytes: a push to servers is sent as soon as this many bytes of frames are ready.

    Raises:
        ConfigError: an invalid value.
    """

    codec_down: str | Codec | None = None
    min_numel: int | None = None
    exclude: Exclude | None = None
    compression: str | Compression | None = None
    reduce: Reduce | None = None
    overlap: bool | None = None
    seed: int = 0
    timeout: float | timedelta = 600.0
    credentials: Credentials | None = None
    connect_timeout_s: float = 30.0
    reconnect_s: float = 60.0
    state_interval: int = 50
    chunk_nbytes: int = CHUNK_NBYTES

    def __post_init__(self) -> None:
        if self.state_interval < 1 or self.chunk_nbytes < 1:
            raise ConfigError(
                f"state_interval={self.state_interval} and chunk_nbytes={self.chunk_nbytes} must be at least 1"
            )
        check_seconds(timeout=self.timeout_s, connect_timeout_s=self.connect_timeout_s, reconnect_s=self.reconnect_s)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> tuple[TrainingOptions, dict[str, Any]]:
        """Splits keyword arguments; returns these options, and the others, which belong to the codec."""
        known = {each.name for each in fields(cls)} & given.keys()
        return cls(**{name: given[name] for name in known}), {n: given[n] for n in given if n not in known}

    @property
    def timeout_s(self) -> float:
        """The timeout in seconds."""
        return in_seconds(self.timeout)

    def design(
        self,
        design: str | Design | None,
        codec: str | Codec | None,
        of_codec: Mapping[str, Any],
        **replaced: str | None,
    ) -> Design:
        """Returns a design with the fields that these options replace.

        Args:
            design: a name or a design; None: a design made from the codecs.
            codec: of the pushes, by default `"3lc"`; not with a design.
            of_codec: its options.
            **replaced: other fields of the design, if not None.

        Raises:
            ConfigError: an unknown name or option, or an invalid combination.
        """
        if design is None:
            up = as_codec("3lc" if codec is None else codec, of_codec)
            down = up if self.codec_down is None else as_codec(self.codec_down, {})
            design = Design(name=up.id, up=up, down=down)
        else:
            self._check_brings_codecs(design, codec, of_codec)
        return find_design(
            design,
            min_numel=self.min_numel,
            transmission=None if self.overlap is None else ("wait-free" if self.overlap else "traditional"),
            reduce=self.reduce,
            compression=self.compression if isinstance(self.compression, str) else None,
            **replaced,
        )

    def _check_brings_codecs(
        self, design: str | Design, codec: str | Codec | None, of_codec: Mapping[str, Any]
    ) -> None:
        """Raises ConfigError if codecs or their options are given with a design."""
        name = design if isinstance(design, str) else design.name
        for would, given in (("codec", codec), ("codec_down", self.codec_down)):
            if given is not None:
                raise ConfigError(
                    f"design={name!r} brings its codecs; {would}=… would change them: leave one of the two out"
                )
        if not of_codec:
            return
        inside = ",".join(f"{key}={value}" for key, value in sorted(of_codec.items()))
        ways = f"{name[:-1]},{inside}]" if name.endswith("]") else f"{name}[{inside}]"
        try:
            find_design(ways)
        except ConfigError as error:
            unknown = ", ".join(sorted(of_codec))
            raise ConfigError(f"tw.distribute has no {unknown}, nor has the design: {error}") from error
        raise ConfigError(f"design={name!r} brings its codecs and their options; write design={ways!r}")

    @property
    def policy(self) -> Compression | None:
        """The policy that replaces the design's, if it was given as an object."""
        return None if isinstance(self.compression, str) else self.compression

    def of_ranks(self, design: Design | None) -> dict[str, Any]:
        """Returns the arguments of `ddp.compress`, for a design that codes gradients or for `"auto"`."""
        common: dict[str, Any] = {
            "seed": self.seed,
            "timeout": self.timeout,
            "credentials": self.credentials,
        }
        if design is None:
            smallest = {} if self.min_numel is None else {"min_numel": self.min_numel}
            return {"codec": AUTO, "exclude": self.exclude, **smallest, **common}
        return {
            "codec": design.up,
            "reduce": design.reduce,
            "nonfinite": design.up.nonfinite,
            **design.choosing(self.policy, self.exclude),
            **common,
        }
