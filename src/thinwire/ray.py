"""The parameter server on a Ray cluster: `tw.ray.launch(train, workers=4, address="auto")`.

`thinwire train --engine ray` does the same for the models that come with thinwire.
"""

from __future__ import annotations

from thinwire.jobs.on_ray import launch

__all__ = ["launch"]
