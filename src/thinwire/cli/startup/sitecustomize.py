"""Python imports this before a script that `thinwire plan` runs; then what else of this name it would have imported."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module

_here = os.path.realpath(os.path.dirname(__file__))
sys.path[:] = [each for each in sys.path if os.path.realpath(each) != _here]
_own = sys.modules.pop("sitecustomize", None)
with suppress(ImportError):
    import_module("sitecustomize")  # the environment's own
sys.modules.setdefault("sitecustomize", _own)  # type: ignore[arg-type]  # Python looks for what it imported

if "THINWIRE_PROFILE" in os.environ:  # else torch is not even loaded
    from thinwire.planner.observing import begin

    begin(os.environ)
