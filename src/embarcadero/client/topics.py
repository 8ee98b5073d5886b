"""A topic as clients see it: its settings, and its schema in all versions."""

from __future__ import annotations

import pyarrow as pa

from embarcadero.types import Range, Tier, Topic
from embarcadero.wire.messages import TopicIs
from embarcadero.wire.schemas import TopicSchemas, decode_versions


class TopicInfo(Topic, frozen=True, kw_only=True):
    """A topic's settings. `schema` is its newest schema (None: raw records), `schemas` every version by number.

    `ranges` tells where it is on disks, oldest first by lane; of very many, the newest. `tier` is its table, if it has
    one, and how far it is in there.
    """

    versions: TopicSchemas
    ranges: list[Range] = []
    tier: Tier | None = None

    @property
    def schema(self) -> pa.Schema | None:
        """The newest schema; None for a topic of raw records."""
        return self.versions.newest if self.versions.typed else None

    @property
    def schemas(self) -> dict[int, pa.Schema]:
        """Every version of the schema, from 1 on; empty for a topic of raw records."""
        return self.versions.all()

    @classmethod
    def told(cls, answer: TopicIs) -> TopicInfo:
        """What a broker told about a topic."""
        settings = {name: getattr(answer.topic, name) for name in Topic.__struct_fields__}
        versions = decode_versions(answer.columns, answer.widths)
        return cls(**settings, versions=versions, ranges=answer.ranges, tier=answer.tier)
