"""A table as earlier versions made it: one table for records and control entries, system columns first."""

from __future__ import annotations

from embarcadero.tier.columns import table_schema
from embarcadero.tier.snapshots import ID, TOPIC, TOPIC_ID, LoadedTable, loaded
from embarcadero.tier.table import TierTable
from embarcadero.types import id_text
from embarcadero.wire.schemas import TopicSchemas


def create_old(table: TierTable, topic: str, table_id: str, schemas: TopicSchemas, topic_id: int = 0) -> LoadedTable:
    """Make the table that those versions made."""
    catalog = table.catalog()
    catalog.create_namespace_if_not_exists("embarcadero")
    properties = {
        ID: table_id, TOPIC: topic, TOPIC_ID: id_text(topic_id), "commit.retry.num-retries": "0",
        "commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "50",
        "write.metadata.delete-after-commit.enabled": "false",
    }  # fmt: skip
    made = catalog.create_table(table.identifier, table_schema(schemas, control=True), properties=properties)
    return loaded(made)
