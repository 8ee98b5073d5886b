"""Configuration: `embarcadero.yaml` < environment < flags. table.py declares every key."""

from embarcadero.config.sources import load
from embarcadero.config.table import DEFAULTS, Config, FabricSizes

__all__ = ["DEFAULTS", "Config", "FabricSizes", "load"]
