"""The names of measured methods.

A DDP hook has torch's name, or that of our codec with `start_step` in the same brackets: `3lc[s=1.75,start_step=50]`
stands for `ddp.compress(model, "3lc", sparsity=1.75, start_step=50)`. PowerSGD takes a `start_step` too. A design of
local updates, as in `diloco[h=30]`, trains through `tw.distribute`. `server:DESIGN` is a design at a parameter server.
`fsdp:METHOD` and `hsdp:METHOD` shard the model; a method is a codec or `none`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thinwire.codecs import Codec, ids
from thinwire.codecs import codec as make_codec
from thinwire.errors import ConfigError
from thinwire.names import parse_name
from thinwire.policies.auto.levels import AUTO
from thinwire.policies.designs import Design, designs
from thinwire.policies.designs import design as find_design
from thinwire_lab.bench.options import STOCK

NOTES = {
    "bf16": "torch refuses its own bf16 hook on gloo; this is the same cast and all-reduce, written out",
    "powersgd-1": "one bucket: with more it aborts or hangs on gloo",
}
"""Notes on hooks, by id."""

POWERSGD = "powersgd-"
SERVED = "server:"
SHARDED = ("fsdp:", "hsdp:")
"""Prefixes of methods that shard the model."""
POWERSGD_START = 2
"""PowerSGD's minimum: its error feedback and warm start need two uncompressed steps."""
SITES = 2
"""Sites of `hsdp`; the ranks of a site share a host."""
_OF_FSDP = ("gather", "start_step")


@dataclass(frozen=True, slots=True)
class Hook:
    """A method by its name."""

    id: str
    codec: Codec | None
    start_step: int
    design: Design | None = None
    auto: Mapping[str, Any] | None = None
    served: bool = False
    sharded: str | None = None

    @property
    def period(self) -> int:
        """Steps between two exchanges of a tensor."""
        return self.design.local.h if self.design and self.design.local else 1

    @property
    def recipe(self) -> str | None:
        """The design with this method's recipe; None for the usual recipe."""
        return "demo" if self.id == "demo" else None

    @property
    def compresses(self) -> bool:
        """Whether a codec of ours compresses at least one way; local updates in float32 both ways are uncompressed."""
        if self.design is not None:
            return {self.design.up.id, self.design.down.id} != {"fp32"}
        return self.codec is not None or self.auto is not None


def hook(name: str) -> Hook:
    """Returns the method of a name.

    Example:
        >>> hook("3lc[s=1.75,start_step=50]").start_step, hook("powersgd-2").start_step, hook("fp16").codec
        (50, 2, None)
        >>> hook("diloco[h=30,codec=fp32]").period, hook("diloco[h=30,codec=fp32]").compresses
        (30, False)
    """
    if name.startswith(SERVED):
        design = find_design(name.removeprefix(SERVED))
        return Hook(name.partition("[")[0], None, 0, design, served=True)
    if name.startswith(SHARDED):
        return _sharded(name)
    found, options = parse_name(name, "hook")
    powersgd, codec = found.startswith(POWERSGD), None
    least = POWERSGD_START if powersgd else 0
    start = options.pop("start_step", None)
    if found in STOCK:
        if options or (start is not None and not powersgd):
            raise ConfigError(f"hook {name!r}: torch's hooks have no options here except PowerSGD's start_step")
    elif found == AUTO:
        if unknown := sorted(options.keys() - {"lag_limit", "target"}):
            raise ConfigError(f"hook {name!r}: {', '.join(unknown)}; allowed are lag_limit, target and start_step")
        return Hook(found, None, start or 0, auto=options)
    elif found in ids():
        codec = make_codec(found, **options)
    elif found in designs() and (design := find_design(name)).local is not None:
        return Hook(found, None, 0, design)
    else:
        raise ConfigError(
            f"unknown hook {name!r}; there are {', '.join((*STOCK, AUTO))}, codecs: {ids()}, designs of local "
            "updates, and fsdp:METHOD and hsdp:METHOD"
        )
    start = least if start is None else start
    if type(start) is not int or start < least:
        raise ConfigError(f"hook {name!r}: start_step={start}; it is a number of steps, at least {least}")
    return Hook(found, codec, start)


def _sharded(name: str) -> Hook:
    """Returns the sharded method of a name, as in `hsdp:none` or `fsdp:3lc[s=1.0]`."""
    kind, _, method = name.partition(":")
    found, given = parse_name(method, "codec")
    if found == "none" and given:
        raise ConfigError(f"{name!r}: stock FSDP2 has no options; leave out {', '.join(given)}")
    own = {option: value for option, value in given.items() if option not in _OF_FSDP}
    codec = None if found in ("none", AUTO) else make_codec(found, **own)
    auto = own if found == AUTO else None
    return Hook(name.partition("[")[0], codec, given.get("start_step", 0), auto=auto, sharded=kind)


def last_line(error: str) -> str:
    """Returns the cause of a method's failure, for a table; the file of results has the ranks' tracebacks.

    >>> last_line("EngineError: rank 1 ended; last lines:\\n    [rank1]: NonFiniteError: w\\nstopped: rank 0")
    '[rank1]: NonFiniteError: w'
    """
    quoted = [line.strip() for line in error.splitlines() if line.startswith("    ")]  # the engine indents quotes
    return quoted[-1] if quoted else error
