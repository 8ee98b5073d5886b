"""The error tree. Every error has a message (the problem), a hint (what to do), and a page (its section in the docs).

EmbarcaderoError
├── UsageError                the call is wrong; nothing was sent
│   ├── BadName               a topic or session name is not allowed
│   ├── BadValue              an argument or option has a wrong type or is out of range
│   │   └── BadSchema         a schema is not allowed, or data or changes do not fit the topic's schema
│   ├── BadConfiguration      a file, variable or flag is wrong; the message lists all problems
│   ├── OutOfSequence         a session_seq does not continue the session
│   ├── Closed                the object was closed before this call
│   └── Forked                a publisher, subscriber or future of the parent process was used in a forked child
├── NotAvailable              this cluster, version or machine cannot do this
├── Refused                   the cluster refused the request and stored nothing; a retry gives the same answer
│   ├── UnknownTopic          there is no topic with this name
│   │   └── TopicReplaced     the topic was deleted, and another topic has its name
│   ├── TopicExists           a topic with this name exists
│   ├── UnknownSchema         a batch has a schema version that its topic does not have
│   ├── UnknownSession        the session was never opened, or expired long ago
│   ├── SessionFenced         another holder opened the session's name, or a gap did not close in time
│   ├── Conflict              the same session sequence was stored before with other bytes
│   ├── Stale                 the sequence is below the session's window
│   ├── Lost                  the sequence was declared lost (on_gap="skip") before the batch arrived
│   ├── FuturePosition        a read or a trim is beyond the end of the log
│   ├── Trimmed               a read is below the start of the log
│   ├── BadReference          the staged batch of a reference is gone, or differs from the reference
│   ├── StagedGone            staged batches were deleted or trimmed before their write was complete
│   ├── TierBusy              another job writes the table of this topic
│   ├── Deposed               another job has taken over the table of this topic
│   └── TooMany               a limit of the cluster is reached
├── Retriable                 nothing was stored; the same call may succeed later
│   ├── Unreachable           no broker answers
│   ├── Backpressure          the cluster has been full for too long
│   └── TierUnavailable       a catalog or an object store does not answer, is locked, or refuses access
├── RecordsLost               records were acked with ack=1, and lost with the whole fabric; has their positions
├── OutcomeUnknown            the operation may or may not have happened
│   └── TimedOut              the timeout of the call passed
│       └── LossUnknown       records were acked with ack=1, and the publisher ended before their loss was known
├── ManyErrors                several publishers of a log failed; also an ExceptionGroup with all their errors
├── ProtocolError             the peer violated the protocol, or uses another version
│   ├── BadMagic              a frame does not start with the magic bytes
│   ├── BadVersion            the peer uses another protocol version
│   ├── FrameTooLarge         the length of a frame is above its limit
│   ├── BadFrame              a length, count or field contradicts the rest of the frame
│   └── OverCredit            the peer sent more bytes than it was granted
├── Corrupt                   damaged data was found and not served
│   ├── ChecksumMismatch      a header, entry or payload does not match its checksum
│   ├── BadTable              a table does not belong to the topic or is behind it, or a file is missing or damaged
│   ├── BadSegment            a segment, index or checkpoint file is damaged, foreign or of a newer format
│   └── BadRegion             a fabric region has a wrong magic, version, size or generation
└── ClusterError              starting, stopping or finding a cluster failed
    ├── AlreadyRunning        a cluster runs in this folder
    ├── NotRunning            no cluster runs in this folder
    ├── PortInUse             another program listens on the port
    ├── FabricFull            the memory file system has no space
    ├── WrongFolder           the data folder belongs to another cluster, replica or version, is a copy, or is in use
    ├── DiskFull              a disk has no space; a full replica does not count as a copy
    └── DiskFailed            a disk cannot be read or written; the message has the file and the operation
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embarcadero.types import Position


class EmbarcaderoError(Exception):
    """Base class of all errors. `message` states the problem, `hint` states what to do.

    The printed form also has the page of the error: `message (hint) [docs/errors.md#unknowntopic]`.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint

    @property
    def page(self) -> str:
        """The section of the documentation that explains this class of errors."""
        return f"docs/errors.md#{type(self).__name__.lower()}"

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.page}]"

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
    """An error about records: `positions` has the first record of each batch, `counts` its number of records."""

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
    """Acked records are lost. `positions` has the first record of each batch, `counts` its number of records."""


class OutcomeUnknown(EmbarcaderoError): ...
class TimedOut(OutcomeUnknown, TimeoutError): ...


class LossUnknown(_OfRecords, TimedOut):
    """Acked records may be lost. `positions` has the first record of each batch, `counts` its number of records."""


class ManyErrors(EmbarcaderoError, ExceptionGroup[EmbarcaderoError]):
    """Several errors of one call. `exceptions` has them, and `except*` separates them."""

    def __new__(cls, message: str, errors: Sequence[EmbarcaderoError]) -> ManyErrors:
        """Create the group from a message and its errors."""
        return super().__new__(cls, message, errors)

    def __init__(self, message: str, errors: Sequence[EmbarcaderoError]) -> None:  # noqa: ARG002 - see __new__
        self.hint = errors[0].hint

    def __reduce__(self) -> Any:
        return type(self), (self.message, list(self.exceptions))

    def derive(self, excs: Sequence[Any]) -> ExceptionGroup[Any]:
        """Return a part of the group, for `except*`."""
        return ManyErrors(self.message, excs)


def raise_as_one(errors: Sequence[EmbarcaderoError]) -> None:
    """Raise these errors, if there are any. A first RecordsLost is raised itself, with the others as its cause."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        every = "; ".join(f"{type(error).__name__}: {error.message}" for error in errors)
        lost, *others = errors
        if isinstance(lost, RecordsLost):
            raise lost from (others[0] if len(others) == 1 else ManyErrors(every, others))
        raise ManyErrors(every, errors)


def as_reported(error: Exception) -> EmbarcaderoError:
    """Return the error if it is an EmbarcaderoError. Otherwise wrap it: it becomes the cause."""
    if isinstance(error, EmbarcaderoError):
        return error
    wrapped = EmbarcaderoError(f"unexpected {type(error).__name__}: {error}", "report it: this is a bug")
    wrapped.__cause__ = error
    return wrapped


def fresh(error: EmbarcaderoError) -> EmbarcaderoError:
    """Return a copy to raise. One object that is raised in many threads would mix their tracebacks."""
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
"""Errors of the store after which nothing has changed, and the call may be repeated later."""


def _tree(root: type[EmbarcaderoError]) -> dict[str, type[EmbarcaderoError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        if child is not ManyErrors:  # it never travels: clients create it from other errors
            found.update(_tree(child))
    return found


BY_NAME: dict[str, type[EmbarcaderoError]] = _tree(EmbarcaderoError)
"""Error classes by name. The name is the code on the wire."""


def from_wire(code: str, message: str, hint: str = "") -> EmbarcaderoError:
    """Return the typed error that a peer reported."""
    return BY_NAME.get(code, EmbarcaderoError)(message, hint)


def clusters_need_linux() -> NotAvailable:
    """Return the error for starting or inspecting a cluster on a system other than Linux."""
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
    """Raise InvariantBroken unless a condition that must always hold is true."""
    if not holds:
        raise InvariantBroken(message)
