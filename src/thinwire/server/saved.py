"""Which checkpoints a shard and its workers have, and which of them nobody needs any more.

Everybody keeps the newest step that all have until it knows of a newer one. So there always is one that all have: the
newest that all ever had is removed only by somebody who knows of a newer one that all have had.

A worker that began late, or writes none, takes any step. One that was let in and has said nothing yet may have that
step alone at which it was: others may go on without it, and must not remove what only it still counts on. What all know
to be safe stays so, whoever comes or goes.
"""

from __future__ import annotations

from collections.abc import Collection

from thinwire.schema import Saved


class SavedSteps:
    """What one shard knows.

    Attributes:
        safe: the newest step that all workers know everybody to have; None before they have said so, −1 if there is
            none: what is older is not needed.
        silent: the workers that were let in, and have said nothing since.

    Example:
        >>> saved = SavedSteps()
        >>> saved.add(0, Saved(steps=(60, 70), safe=50))
        >>> saved.add(1, Saved(steps=(50, 60), safe=50))
        >>> saved.news({50, 60}), saved.news({50, 60}), saved.safe
        (Saved(steps=(60,), safe=-1), None, 50)
    """

    def __init__(self) -> None:
        self.safe: int | None = None
        self._own: set[int] | None = None
        self._workers: dict[int, Saved] = {}
        self.silent: set[int] = set()
        self._told: Saved | None = None

    def let_in(self, rank: int, step: int) -> None:
        """A worker goes on from a step: it says what it has before it pushes anything, or writes none."""
        self._workers[rank] = Saved(steps=(step,))
        self.silent.add(rank)

    def pushed(self, rank: int) -> None:
        """A silent worker has pushed: what it has not said by now, it never will."""
        self.drop(rank)

    def add(self, rank: int, saved: Saved) -> None:
        """A worker says what it has."""
        self._workers[rank] = saved
        self.silent.discard(rank)
        least = min(each.safe for each in self._workers.values())
        self.safe = least if self.safe is None else max(self.safe, least)

    def drop(self, rank: int) -> None:
        """A worker takes part no more: what it has is of no use."""
        self._workers.pop(rank, None)
        self.silent.discard(rank)

    def went_back(self, step: int) -> None:
        """All went back to a step: everybody has it, and nobody has a later one."""
        self.safe = None if self.safe is None else step
        self._own = None if self._own is None else {each for each in self._own if each <= step}
        self._workers.clear()
        self.silent.clear()

    def news(self, own: Collection[int] | None = None) -> Saved | None:
        """Returns what all workers are to hear, where it has changed.

        Args:
            own: the steps that the shard has from now on; None: as before.
        """
        self._own = self._own if own is None else {*own}
        if (message := self.message()) == self._told:
            return None
        self._told = message
        return message

    def message(self) -> Saved | None:
        """Returns which of the shard's steps all workers have; None where it writes no checkpoints."""
        if self._own is None:
            return None
        common = self._own.intersection(*(each.steps for each in self._workers.values() if each.steps is not None))
        return Saved(steps=tuple(sorted(common, reverse=True)))
