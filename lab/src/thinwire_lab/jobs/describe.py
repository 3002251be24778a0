"""What was chosen for a run, as text: of a job that is asked for, of one that is stored, and of a comparison of many.

All three have such fields under the same names, and a stored one has no class: this takes them by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from thinwire_lab.jobs.options import JobOptions, RecipeOptions

_OF_DESIGNS = ("codec_up", "codec_down", "consistency", "placement", "compression", "transmission")
_OF_RECIPES = tuple(field.name for field in fields(RecipeOptions) if field.name not in ("batch", "lr"))


def choices(asked: Mapping[str, Any]) -> str:
    """Returns what was chosen in place of the designs' and the recipes' own; empty where nothing was.

    Batch and rate are not in it: every stored job spells them out.

    Example:
        >>> choices({"placement": "uniform", "compression": "by-shape", "dropout": None})
        'placement=uniform, compression=by-shape'
        >>> choices({"optimizer": "SGD", "momentum": 0.0, "lr": 0.1})
        'optimizer=SGD, momentum=0.0'
    """
    names = (name for name in (*_OF_DESIGNS, *_OF_RECIPES) if asked.get(name) is not None)
    return ", ".join(f"{name}={asked[name]}" for name in names)


def servers_of(asked: Mapping[str, Any]) -> str:
    """Returns where the servers are."""
    if asked.get("servers_on_workers"):
        return "one on every worker's node"
    return f"{asked.get('servers') or JobOptions.servers} of their own"
