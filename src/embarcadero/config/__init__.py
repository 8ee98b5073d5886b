"""Configuration: `embarcadero.yaml` < environment < flags. table.py declares every key; all else follows from it."""

from embarcadero.config.resolve import load
from embarcadero.config.sizes import FabricSizes
from embarcadero.config.table import DEFAULTS, Config

__all__ = ["DEFAULTS", "Config", "FabricSizes", "load"]
