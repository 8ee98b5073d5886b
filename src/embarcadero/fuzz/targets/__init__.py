"""All targets, by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from embarcadero.fuzz.target import Target
from embarcadero.fuzz.targets.fabric import FABRIC
from embarcadero.fuzz.targets.payload import PAYLOAD
from embarcadero.fuzz.targets.placement import PLACEMENT
from embarcadero.fuzz.targets.serving import SERVING
from embarcadero.fuzz.targets.settings import SETTINGS
from embarcadero.fuzz.targets.storage import STORAGE
from embarcadero.fuzz.targets.wire import WIRE

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in (*WIRE, *PAYLOAD, *FABRIC, *STORAGE, *PLACEMENT, *SETTINGS, *SERVING)
}

if find_spec("pyiceberg") is not None:
    from embarcadero.fuzz.targets.tier import TIER

    TARGETS.update({target.name: target for target in TIER})
