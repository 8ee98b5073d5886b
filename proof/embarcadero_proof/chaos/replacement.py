"""Which processes of a cluster were replaced, according to the store."""

from __future__ import annotations

from embarcadero.placement.directory import Directory
from embarcadero.types import MemberState


def is_replaced(directory: Directory, role: str, pid: int) -> bool:
    """Whether the process of a role was replaced.

    Another sequencer leads; or the broker's incarnation is closed; or no open range names the replica's incarnation.
    """
    kind = role.partition(":")[0]
    if kind == "broker":
        return not any(member.pid == pid and member.state is MemberState.LIVE for member in directory.members.all())
    if kind == "replica":
        own = [member.ref for member in directory.replicas.all() if member.pid == pid]
        return not any(ref in own for range_ in directory.ranges.all() if range_.open for ref in range_.replicas)
    leadership = directory.elections.leadership()
    if leadership is None:
        return False
    return leadership.pid != pid and leadership.epoch == directory.elections.started_epoch()
