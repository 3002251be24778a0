"""The parameter server on a Ray cluster: `tw.ray.launch(train, workers=4, address="auto")`.

Example::

    def train(rank, servers):               # on every node; torch and the model are made there
        opt = tw.distribute(model, optimizer, server=servers, rank=rank, workers=4)
        ...

    losses = tw.ray.launch(train, workers=4, address="auto", insecure=True)     # what each returned, by rank

`thinwire train --engine ray` does the same for the models that come with thinwire.
"""

from __future__ import annotations

from thinwire.jobs.on_ray import launch

__all__ = ["launch"]
