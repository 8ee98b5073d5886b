"""The error tree. Every error names the problem and what to do about it.

EmbarcaderoError
├── UsageError                the caller's mistake; nothing was sent
│   ├── BadName               a topic or session name that is not allowed
│   ├── BadValue              an argument or option out of range
│   │   └── BadSchema         a schema that no topic may have, or data or changes that do not fit the topic's schema
│   ├── BadConfiguration      a file, variable or flag that is wrong; names all problems
│   ├── OutOfSequence         a session_seq that does not continue the session
│   ├── Closed                the object was closed before this call
│   └── Forked                a publisher, subscriber or future of the parent process, used in a forked child
├── NotAvailable              this cluster cannot do that (yet)
├── Refused                   the cluster said no; nothing was stored; trying again gives the same answer
│   ├── UnknownTopic
│   │   └── TopicReplaced     the topic that was meant is deleted, and another one has its name
│   ├── TopicExists
│   ├── UnknownSchema         a batch of a schema version that its topic does not have
│   ├── UnknownSession        the session was never opened, or is long gone
│   ├── SessionFenced         another holder opened the session's name, or a gap did not close in time
│   ├── Conflict              the same session sequence was stored before with other bytes
│   ├── Stale                 the sequence is below the session's window
│   ├── Lost                  the sequence was declared lost (on_gap="skip") before the batch came
│   ├── FuturePosition        a read or a trim beyond the end of the log
│   ├── Trimmed               a read below the start of the log
│   ├── BadReference          the staged batch that was to be published is not there, or is another one
│   ├── StagedGone            batches that were staged for a write, and were deleted or trimmed before it was complete
│   ├── TierBusy              another job writes the table of this topic
│   ├── Deposed               another job has taken the table of this topic over
│   └── TooMany               a limit of the cluster is reached
├── Retriable                 nothing was stored; the same call may succeed later
│   ├── Unreachable           no broker answers
│   ├── Backpressure          the cluster has been full for too long
│   └── TierUnavailable       a catalog or an object store that does not answer, is locked, or says no
├── RecordsLost               acked with ack=1, not yet durable, and lost with the whole fabric; names the positions
├── OutcomeUnknown            it may or may not have happened
│   └── TimedOut              the time the caller gave is over
│       └── LossUnknown       acked with ack=1; the publisher ended before a broker could say whether they are lost
├── ManyErrors                several publishers of a log failed; also an ExceptionGroup with all their errors
├── ProtocolError             the peer speaks nonsense, or another version
│   ├── BadMagic
│   ├── BadVersion
│   ├── FrameTooLarge
│   ├── BadFrame              a length, count or field that contradicts the rest
│   └── OverCredit            the peer sent more than it was granted
├── Corrupt                   wrong bytes were found, and not served
│   ├── ChecksumMismatch
│   ├── BadTable              a table that is not the topic's or is behind, or a file of it that is missing or damaged
│   ├── BadSegment            a segment, index or checkpoint file that is damaged, foreign or of a newer format
│   └── BadRegion             a fabric region with a wrong magic, version, size or generation
└── ClusterError              starting, stopping or finding a cluster
    ├── AlreadyRunning
    ├── NotRunning
    ├── PortInUse
    ├── FabricFull            the memory file system has no room
    ├── WrongFolder           a data folder of another cluster, another replica, a newer version, a copy, or in use
    ├── DiskFull              a replica's disk has no room; it stops counting until it has
    └── DiskFailed            a disk that can't be read or written; names the file and the operation
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embarcadero.types import Position


class EmbarcaderoError(Exception):
    """Base of all errors. `hint` says what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[EmbarcaderoError], tuple[str, str]]:
        return type(self), (self.message, self.hint)


class UsageError(EmbarcaderoError, ValueError): ...
class BadName(UsageError): ...
class BadValue(UsageError): ...
class BadSchema(BadValue): ...
class BadConfiguration(UsageError): ...
class OutOfSequence(UsageError): ...
class Closed(UsageError): ...
class Forked(UsageError): ...


class NotAvailable(EmbarcaderoError): ...


class Refused(EmbarcaderoError): ...
class UnknownTopic(Refused): ...
class TopicReplaced(UnknownTopic): ...
class TopicExists(Refused): ...
class UnknownSchema(Refused): ...
class UnknownSession(Refused): ...
class SessionFenced(Refused): ...
class Conflict(Refused): ...
class Stale(Refused): ...
class Lost(Refused): ...
class FuturePosition(Refused): ...
class Trimmed(Refused): ...
class BadReference(Refused): ...
class StagedGone(Refused): ...
class TierBusy(Refused): ...
class Deposed(Refused): ...
class TooMany(Refused): ...


class Retriable(EmbarcaderoError): ...
class Unreachable(Retriable, ConnectionError): ...
class Backpressure(Retriable): ...
class TierUnavailable(Retriable): ...


class _OfRecords:
    """An error about records: `positions` has the first record of each batch, `counts` how many records it had."""

    message: str
    hint: str

    def __init__(
        self, message: str, hint: str = "", positions: Iterable[Position] = (), counts: Iterable[int] = ()
    ) -> None:
        super().__init__(message, hint)  # type: ignore[call-arg]
        self.positions, self.counts = tuple(positions), tuple(counts)

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.hint, self.positions, self.counts)


class RecordsLost(_OfRecords, EmbarcaderoError):
    """Records that were acked and are lost."""


class OutcomeUnknown(EmbarcaderoError): ...
class TimedOut(OutcomeUnknown, TimeoutError): ...


class LossUnknown(_OfRecords, TimedOut):
    """Records that were acked and may be lost."""


class ManyErrors(EmbarcaderoError, ExceptionGroup[EmbarcaderoError]):
    """Several errors that one call has to report; `exceptions` has them, and `except*` takes them apart."""

    def __new__(cls, message: str, errors: Sequence[EmbarcaderoError]) -> ManyErrors:
        """An exception group is made of its message and its errors."""
        return super().__new__(cls, message, errors)

    def __init__(self, message: str, errors: Sequence[EmbarcaderoError]) -> None:  # noqa: ARG002 - see __new__
        self.hint = errors[0].hint

    def __reduce__(self) -> Any:
        return type(self), (self.message, list(self.exceptions))

    def derive(self, excs: Sequence[Any]) -> ExceptionGroup[Any]:
        """A part of the group, as `except*` makes it."""
        return ManyErrors(self.message, excs)


def raise_as_one(errors: Sequence[EmbarcaderoError]) -> None:
    """Raise all of these, if there are any. A loss stays a RecordsLost; its cause is then what failed besides."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        every = "; ".join(f"{type(error).__name__}: {error.message}" for error in errors)
        lost, *others = errors
        if isinstance(lost, RecordsLost):
            raise lost from (others[0] if len(others) == 1 else ManyErrors(every, others))
        raise ManyErrors(every, errors)


def as_reported(error: Exception) -> EmbarcaderoError:
    """An error that is to be raised together with others; one that is not ours becomes the cause of one that is."""
    if isinstance(error, EmbarcaderoError):
        return error
    wrapped = EmbarcaderoError(f"unexpected {type(error).__name__}: {error}", "report it: this is a bug")
    wrapped.__cause__ = error
    return wrapped


def fresh(error: EmbarcaderoError) -> EmbarcaderoError:
    """A copy to raise: raising one object in many threads would mix up their tracebacks."""
    kind, arguments = error.__reduce__()
    return kind(*arguments)


class ProtocolError(EmbarcaderoError): ...
class BadMagic(ProtocolError): ...
class BadVersion(ProtocolError): ...
class FrameTooLarge(ProtocolError): ...
class BadFrame(ProtocolError): ...
class OverCredit(ProtocolError): ...


class Corrupt(EmbarcaderoError): ...
class ChecksumMismatch(Corrupt): ...
class BadTable(Corrupt): ...
class BadSegment(Corrupt): ...
class BadRegion(Corrupt): ...


class ClusterError(EmbarcaderoError): ...
class AlreadyRunning(ClusterError): ...
class NotRunning(ClusterError): ...
class PortInUse(ClusterError): ...
class FabricFull(ClusterError): ...
class WrongFolder(ClusterError): ...
class DiskFull(ClusterError): ...
class DiskFailed(ClusterError): ...


LATER = (Retriable, DiskFull, DiskFailed)
"""What a call of the store ends with when it did nothing, and may be made again later."""


def _tree(root: type[EmbarcaderoError]) -> dict[str, type[EmbarcaderoError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        if child is not ManyErrors:  # made here, of other errors
            found.update(_tree(child))
    return found


BY_NAME: dict[str, type[EmbarcaderoError]] = _tree(EmbarcaderoError)
"""Errors by class name: the name is the code that travels over the wire."""


def from_wire(code: str, message: str, hint: str = "") -> EmbarcaderoError:
    """The typed error that a peer reported."""
    return BY_NAME.get(code, EmbarcaderoError)(message, hint)


def clusters_need_linux() -> NotAvailable:
    """The error of a program that starts or inspects a cluster on another system."""
    return NotAvailable(
        f"the processes of a cluster run on Linux, and this is {sys.platform}",
        "run them on Linux or in a container; clients run here: connect to the address of a broker",
    )


def require_linux() -> None:
    """Refuse to start a cluster on a system that cannot run one. Raises NotAvailable."""
    if sys.platform != "linux":
        raise clusters_need_linux()


def __dir__() -> list[str]:
    return sorted(BY_NAME.keys() | {ManyErrors.__name__})


# --- invariants: always on, since `python -O` strips `assert` ---------------------------------------------------------
class InvariantBroken(AssertionError):
    """A bug in Embarcadero itself. Please report it with the message and the traceback."""


def invariant(holds: bool | object, message: str) -> None:
    """Stop at once when something that must always hold does not."""
    if not holds:
        raise InvariantBroken(message)
