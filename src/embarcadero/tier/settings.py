"""Where tables are: the catalog, the warehouse, and how to reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from embarcadero.config import Config
from embarcadero.errors import BadValue
from embarcadero.limits import HOT_RETENTION_S, TIER_FILE_BYTES, TIER_INTERVAL_S

NAMESPACE: Final = "embarcadero"
_BUSY_S: Final = 10  # how long SQLite waits for another process's transaction


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What a tiering job needs to know. `properties` are PyIceberg's, for the catalog and for files."""

    warehouse: str
    properties: dict[str, str] = field(default_factory=dict)
    hot_retention_s: int = HOT_RETENTION_S
    file_bytes: int = TIER_FILE_BYTES
    interval_s: float = TIER_INTERVAL_S

    @property
    def catalog(self) -> dict[str, str]:
        """Properties of the catalog."""
        return {**self.properties, "warehouse": self.warehouse}

    @classmethod
    def local(cls, folder: Path, **more: object) -> TierSettings:
        """A catalog in an SQLite file and a warehouse beside it, in a folder."""
        return cls(**{"warehouse": f"file://{folder / 'warehouse'}", "properties": sqlite_catalog(folder), **more})  # type: ignore[arg-type]

    @classmethod
    def of(cls, config: Config, data_dir: Path) -> TierSettings:
        """As configured (`tier.*`); what is not said is kept in the cluster's folder."""
        said, folder = config.tier, data_dir / "tier"
        properties = parse_properties(said.properties)
        if "type" not in properties and "uri" not in properties:
            properties |= sqlite_catalog(folder)
        return cls(
            warehouse=said.warehouse or f"file://{folder / 'warehouse'}",
            properties=properties,
            hot_retention_s=int(said.hot_retention_s),
            file_bytes=said.file_bytes,
            interval_s=said.interval_s,
        )


def sqlite_catalog(folder: Path) -> dict[str, str]:
    """Properties of a catalog in a folder."""
    return {"type": "sql", "uri": f"sqlite:///{folder / 'catalog.db'}?timeout={_BUSY_S}"}


def parse_properties(pairs: Sequence[str], what: str = "tier.properties") -> dict[str, str]:
    """`key=value` pairs. BadValue names one that is none, and what they are."""
    found: dict[str, str] = {}
    for number, pair in enumerate(pairs, start=1):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():  # it may be a part of a secret: not shown
            hint = "write key=value, such as s3.region=eu-west-1; a value with a comma needs a list in the file"
            raise BadValue(f"{what} has {len(pairs)} entries, and number {number} has no name and '='", hint)
        found[key.strip()] = value.strip()
    return found
