"""A new consistency policy: exchange in every step at first, and only every k-th step once training has settled.

The cores ask a policy a few questions and keep the books themselves; a policy answers those where it differs.
With the entry point of docs/extending.md installed: `thinwire train --consistency 'post-local[warm=50,steps=4]'`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire import ConfigError
from thinwire.policies.consistency import Consistency


@dataclass(frozen=True, kw_only=True)
class PostLocal(Consistency):
    """Bulk-synchronous for `warm` steps, then one exchange for `steps` of them (after Lin et al., ICLR 2020)."""

    id: ClassVar[str] = "post-local"
    warm: int = 100
    steps: int = 4

    def __post_init__(self) -> None:
        if self.warm < 0 or self.steps < 1:
            raise ConfigError(f"post-local: warm={self.warm}, steps={self.steps}; expected at least 0 and 1")

    def exchanges(self, iteration: int) -> bool:
        return iteration < self.warm or (iteration - self.warm + 1) % self.steps == 0
