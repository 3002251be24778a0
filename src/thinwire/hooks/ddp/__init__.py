"""One line in an existing DistributedDataParallel script: `ddp.compress(model, codec="3lc", sparsity=1.0)`.

plan      who owns which values            exchange   the arithmetic of one bucket, both passes
message   what ranks say to each other     pipeline   two threads that keep buckets moving
mesh      moves messages over gloo         state      residuals, checkpoints, other world sizes
hook      compress() and the hook itself   report     what it cost and whether it paid
job       buckets that travel together     residuals  what was not sent, by name and slice
"""

from __future__ import annotations

from thinwire.hooks.ddp.hook import compress, thinwire_hook
from thinwire.hooks.ddp.report import Report, report
from thinwire.hooks.ddp.state import ThinwireState, merge

__all__ = ["Report", "ThinwireState", "compress", "merge", "report", "thinwire_hook"]
