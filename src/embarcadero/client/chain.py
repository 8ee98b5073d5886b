"""The sessions of one publisher, each continuing the one before, and how to go on when some of them are gone.

Sessions are opened by entries in the log, so a loss of the whole fabric may take the newest of them. A session that the
cluster does not know is then looked for under the one that it continued. If none of the chain is left, a new session
may take its place only if the very first one was opened inside a LOST gap: then nothing of this publisher is in the
log, and nothing can be stored twice. A name is then opened over whoever had it before us, never over who had it since.
Should the handle of a session that was opened inside a LOST gap be another's by now (handles are not used again, but
nothing here rests on that alone), what was opened in its name is not ours, and nothing is ever sent into it.
"""

from __future__ import annotations

from enum import Enum

from embarcadero.client.acked import Spans
from embarcadero.types import NO_SESSION

_KEPT = 64


class Answer(Enum):
    """What an opened session is to its publisher."""

    OURS = "ours"
    ANOTHERS = "another's"  # our session is lost, and its handle was given to somebody else: look further
    STRANGE = "strange"  # a new one, and nothing shows that the old ones are lost


class SessionChain:
    """Handles of sessions and the index at which each was opened, oldest first."""

    def __init__(self) -> None:
        self._links: list[tuple[int, int]] = []
        self._tried = 0  # how many of the newest are not known to the cluster
        self.whole = True  # the first session is among those kept

    @property
    def handle(self) -> int:
        """The newest session."""
        return self._links[-1][0] if self._links else NO_SESSION

    def resume(self) -> int | None:
        """The session to continue; None: open a new one."""
        return None if self._tried == len(self._links) else self._links[-1 - self._tried][0]

    def gone(self) -> bool:
        """The cluster does not know that session. Whether there is something else to try."""
        left = len(self._links) - self._tried
        self._tried += left > 0
        return left > 1 or (left == 1 and self.whole)

    def is_older_than(self, session: int) -> bool:
        """Whether this session was opened after our first one: handles only grow, whatever is lost."""
        return bool(self._links) and self._links[0][0] <= session != NO_SESSION

    def opened(self, session: int, index: int, lost: Spans) -> Answer:
        """A session is open, at an index of its lane; `lost` has the lane's LOST gaps."""
        left = len(self._links) - self._tried
        if self._links:
            born = self._links[left - 1 if left else 0][1]
            is_lost = any(start <= born < stop for start, stop in lost)
            if is_lost and left:
                return Answer.ANOTHERS
            if not is_lost and not left:
                return Answer.STRANGE
        del self._links[len(self._links) - self._tried :]
        self._tried = 0
        self._links.append((session, index))
        if len(self._links) > _KEPT:
            del self._links[0]
            self.whole = False
        return Answer.OURS
