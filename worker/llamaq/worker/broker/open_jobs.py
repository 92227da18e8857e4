"""Which partitions of a queue have open jobs: the worker does not search the others for jobs."""

from __future__ import annotations


class OpenJobs:
    """The partitions that had no open job when their deadlines were searched last.

    A job is open until it has ended. A worker searches the deadlines of each partition four times a second, and the
    reply counts the open jobs. Without any, there is nothing to reclaim, to move or to cancel. So these searches are
    left out, and an idle worker calls about half as many scripts.

    A new entry ends the wait of the worker, and `forget` is called. If a reply from before the entry arrives after it,
    the other searches wait for the next reply.

    Threads: all methods run on the I/O thread.
    """

    def __init__(self, n_partitions: int) -> None:
        """Create the object. As long as a partition is not counted, it may have open jobs."""
        self._n_partitions = n_partitions
        self._empty: set[int] = set()

    def note(self, partition: int, n_open: int) -> None:
        """Note the number of open jobs of a partition."""
        if n_open:
            self._empty.discard(partition)
        else:
            self._empty.add(partition)

    def forget(self) -> None:
        """Forget all counts, because there is a new job."""
        self._empty.clear()

    def may_exist(self) -> bool:
        """Return whether there may be an open job in any partition."""
        return len(self._empty) < self._n_partitions

    def may_exist_in(self, partition: int) -> bool:
        """Return whether there may be an open job in this partition."""
        return partition not in self._empty

    def __repr__(self) -> str:
        return f"<OpenJobs partitions={self._n_partitions} empty={len(self._empty)}>"
