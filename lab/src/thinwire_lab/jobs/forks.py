"""One process from which servers, workers and ranks are forked, for programs that start many of them.

A process of its own takes three seconds of a processor to import what a role needs, which is more than many a short run
computes; a fork takes a hundredth.
"""

from __future__ import annotations

import atexit
from functools import cache

from thinwire.engines.engine import ENVIRONMENT
from thinwire_lab.engines.starters import Forks

LIBRARIES = (
    *("thinwire.cli.main", "thinwire.cli.server", "thinwire.runtime.serving", "thinwire.transports.grpc.server"),
    *("thinwire_lab.cli.commands", "thinwire_lab.cli.worker", "thinwire_lab.cli.bench", "thinwire_lab.bench.ranks"),
    *("thinwire_lab.jobs.training", "thinwire.runtime.connection", "torch._dynamo"),
)
"""What servers, workers and ranks import; the last one torch does when an optimizer is made."""


@cache
def forks() -> Forks:
    """Returns what forks them: made when it is first asked for, closed when this program ends."""
    made = Forks(LIBRARIES, ENVIRONMENT)
    atexit.register(made.close)
    return made
