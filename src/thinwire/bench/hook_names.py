"""How a hook that is measured is named: torch's own by name, ours by their codec, `start_step` in the same brackets.

`3lc[s=1.75,start_step=50]` is what `ddp.compress(model, "3lc", sparsity=1.75, start_step=50)` registers. Of torch's
hooks PowerSGD can begin late too. Nothing here knows how a hook is installed or measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.codecs import Codec, ids
from thinwire.codecs import codec as make_codec
from thinwire.errors import ConfigError
from thinwire.policies.naming import parse_name

STOCK = ("none", "fp16", "bf16", "powersgd-1", "powersgd-2", "powersgd-4")
"""What torch ships, and `none` for plain DDP."""

OURS = ("3lc[s=1.0]", "3lc[s=1.75,entropy=zstd]", "onebit", "topk")
"""What of ours is measured unless told otherwise: any codec may be, options in brackets."""

NOTES = {
    "bf16": "torch refuses its own bf16 hook on gloo; this is the same cast and all-reduce, written out",
    "powersgd-1": "bucket_cap_mb=100: with default buckets it aborts or hangs on gloo",
}
"""What is to be known of a hook, by id."""

POWERSGD = "powersgd-"
POWERSGD_START = 2
"""PowerSGD's own least: its error feedback and warm start need two uncompressed steps."""


@dataclass(frozen=True, slots=True)
class Hook:
    """What a hook's name says.

    Args:
        id: one of `STOCK`, or a codec's.
        codec: of a hook of ours; None for torch's.
        start_step: steps of the training before it travel uncompressed.
    """

    id: str
    codec: Codec | None
    start_step: int

    @property
    def stock(self) -> bool:
        """Whether it is torch's."""
        return self.codec is None


def hook(name: str) -> Hook:
    """Returns what a name says.

    Raises:
        ConfigError: an unknown hook, an option that it does not have, or a `start_step` that cannot be.

    Example:
        >>> hook("3lc[s=1.75,start_step=50]").start_step, hook("powersgd-2").start_step, hook("fp16").stock
        (50, 2, True)
    """
    found, options = parse_name(name, "hook", short={"s": "sparsity"})
    powersgd, codec = found.startswith(POWERSGD), None
    least = POWERSGD_START if powersgd else 0
    start = options.pop("start_step", None)
    if found in STOCK:
        if options or (start is not None and not powersgd):
            raise ConfigError(f"hook {name!r}: torch's hooks have no options here, but for PowerSGD's start_step")
    elif found in ids():
        codec = make_codec(found, **options)
    else:
        raise ConfigError(f"unknown hook {name!r}; there are {', '.join(STOCK)}, and codecs: {ids()}")
    start = least if start is None else start
    if type(start) is not int or start < least:
        raise ConfigError(f"hook {name!r}: start_step={start}; it is a number of steps, at least {least}")
    return Hook(found, codec, start)
