"""Checks whether a plan can be served, and names the difference between two workers' plans."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from thinwire.codecs import Codec, decode
from thinwire.codecs.registry import codec as make_codec
from thinwire.errors import ProtocolError
from thinwire.policies.differences import differences
from thinwire.schema import FROZEN, Plan, Settings, TableSpec
from thinwire.version import VERSION

MAX_VALUES = 2**36
"""256 GiB of float32: far above any shard, far below what would overflow a size."""
MAX_PLACES = 2**20
"""Workers times tables: a shard takes some 130 bytes for each of them."""
ABOUT_FROZEN = (
    ". They are not sent: before tw.distribute load the same values on every worker, or draw them from the same seed. "
    f"Where they differ on purpose, or are filled later, give all workers settings={{{FROZEN!r}: 'own'}}"
)
_OF_SHARDS = (
    ". Where the model is the same, the servers are not: name all of them on every worker, in one order, and give each "
    "the checkpoint that it wrote"
)
TRIAL = 2.0**-60
"""What a plan's codecs are tried out with: a value below every scale that their options may fix."""


def check_plan(plan: Plan) -> None:
    """Raises ProtocolError where a plan, which a peer sent and `schema` bounds, cannot be what a worker means."""
    if len({spec.name for spec in plan.tables}) != len(plan.tables):
        raise ProtocolError("two tables have one name")
    if plan.workers * len(plan.tables) > MAX_PLACES:  # every table remembers which version each worker was led to
        raise ProtocolError(
            f"{plan.workers} workers × {len(plan.tables)} tables; together at most {MAX_PLACES:,} are possible"
        )
    values = 0
    for spec in plan.tables:
        # Zeros are left out: they would hide dimensions that overflow, as in (0, 2**62).
        values += math.prod(filter(None, spec.shape))
        if values > MAX_VALUES:
            raise ProtocolError(f"{spec.name}: with it the tables have more than {MAX_VALUES} values together")
        if max(spec.up, spec.down) >= len(plan.codecs):
            raise ProtocolError(f"{spec.name}: the plan has no codec {max(spec.up, spec.down)}")
        if spec.group >= len(plan.groups):
            raise ProtocolError(f"{spec.name}: the plan has no parameter group {spec.group}")
    _check_momentum(plan)


def _check_momentum(plan: Plan) -> None:
    """Raises ProtocolError where each end is to add a momentum that is none of Nesterov's SGD."""
    if plan.downlink != "momentum":
        return
    for group in plan.groups:
        momentum = group.get("momentum")
        possible = isinstance(momentum, int | float) and not isinstance(momentum, bool) and 0 <= momentum < 1
        if plan.optimizer != "SGD" or not possible:
            raise ProtocolError(
                f"a plan whose momentum each end adds itself has {plan.optimizer} with momentum={momentum!r}; it goes "
                "with SGD and a momentum from 0 to below 1"
            )


def usable_codecs(plan: Plan) -> list[Codec]:
    """Makes the plan's codecs and tries each out, for options come from a peer and may be of any JSON type.

    Raises:
        ProtocolError: a configuration without an id, or with an option that the codec cannot work with; or none of the
            tables has a codec that the plan's `reduce` is of.
        ConfigError: an unknown codec or option.
    """
    codecs = []
    for config in plan.codecs:
        options: dict[str, Any] = {**config}
        if not isinstance(codec_id := options.pop("id", None), str):
            raise ProtocolError(f"a codec's configuration has an id; {sorted(config)} came")
        codec = make_codec(codec_id, **options)
        try:
            decode(codec.encode(np.full(16, TRIAL, np.float32)))
        except Exception as error:  # whatever comes of an option that is no number
            raise ProtocolError(f"codec {config} cannot be used: {error}") from error
        codecs.append(codec)
    if "senders" in plan.reduce and not any(codecs[spec.up].scheme.sends_some for spec in plan.tables):
        raise ProtocolError(
            f"reduce={plan.reduce!r} is of codecs that send some of the values, and no table's pushes have one: "
            f"{', '.join(sorted({codecs[spec.up].id for spec in plan.tables}))}; plan reduce='mean'"
        )
    return codecs


def difference(ours: Plan, theirs: Plan, *, begun: bool = False) -> str | None:
    """Returns in what a joining worker's plan differs from the agreed one, naming the tensor, or None.

    Args:
        ours: the agreed plan.
        theirs: of the worker that joins.
        begun: steps have been taken, in which a model may have changed its frozen parameters, as a teacher that follows
            the trained ones: those of the beginning say nothing then.
    """
    if begun or not all(FROZEN in plan.settings for plan in (ours, theirs)):  # one goes on from a state, or has none
        ours, theirs = _without_frozen(ours), _without_frozen(theirs)
    if ours == theirs:
        return None
    if theirs.workers != ours.workers:
        return (
            f"this worker expects {theirs.workers} workers, the others {ours.workers}: a training goes on, and "
            "resumes, with as many as it began with; with another number it begins anew from the model's weights"
        )
    return (
        _kind_difference(ours.local, theirs.local)
        or _table_difference(ours.tables, theirs.tables)
        or _field_difference(ours, theirs)
        or _setting_difference(ours.settings, theirs.settings)
        or "this worker's plan differs from the others'"
    )


def _table_difference(ours: tuple[TableSpec, ...], theirs: tuple[TableSpec, ...]) -> str | None:
    here = {spec.name: spec for spec in ours}
    there = {spec.name: spec for spec in theirs}
    for name, spec in there.items():
        if name not in here:
            return f"this worker's model has a tensor {name!r} that the others' do not have{_OF_SHARDS}"
        if spec.shape != here[name].shape:
            return (
                f"tensor {name!r} has shape {spec.shape} in this worker's model and {here[name].shape} in the others'"
            )
        if spec.dtype != here[name].dtype:
            return (
                f"tensor {name!r} is {spec.dtype} in this worker's model and {here[name].dtype} in the others': "
                "replicas would differ by rounding; give all workers' models the same dtype before tw.distribute"
            )
    for name in here:
        if name not in there:
            return f"this worker's model lacks the tensor {name!r} that the others' have{_OF_SHARDS}"
    for name, spec in there.items():
        for path, mine, other in differences(msgspec.to_builtins(spec), msgspec.to_builtins(here[name]), name):
            return f"tensor {path}: this worker plans {mine}, the others {other}"
    return None


def _kind_difference(ours: str, theirs: str) -> str | None:
    if bool(ours) == bool(theirs):
        return None
    some, others = ("updates (local updates)", "gradients") if theirs else ("gradients", "updates (local updates)")
    return f"this worker's design pushes {some}, the others' {others}: start all workers with the same"


def _field_difference(ours: Plan, theirs: Plan) -> str | None:
    if ours.local and theirs.local and theirs.consistency != ours.consistency:
        return (
            f"h, inner steps between exchanges: this worker plans {theirs.consistency}, the others {ours.consistency}"
        )
    for field in ("codecs", "optimizer", "groups", "reduce", "state_interval", "consistency", "downlink", "local"):
        found = differences(getattr(theirs, field), getattr(ours, field), field)
        if told := "; ".join(f"{path}: this worker plans {there}, the others {here}" for path, there, here in found):
            return told
    return None


def _setting_difference(ours: Settings, theirs: Settings) -> str | None:
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            here, there = (repr(each[name]) if name in each else "none" for each in (ours, theirs))
            told = f"{name}: this worker has {there}, the others {here}; start all workers with the same"
            return told + (ABOUT_FROZEN if name == FROZEN else "")
    return None


def check_version(version: str) -> None:
    """Raises ProtocolError where a joining worker runs another thinwire than this server."""
    if version not in ("", VERSION):
        raise ProtocolError(
            f"version: this worker runs thinwire {version}, the server {VERSION}; install one version on all machines"
        )


def _without_frozen(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, settings={k: each for k, each in plan.settings.items() if k != FROZEN})
