"""All targets, by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from embarcadero_proof.fuzz.target import Target
from embarcadero_proof.fuzz.targets.fabric import FABRIC
from embarcadero_proof.fuzz.targets.payload import PAYLOAD
from embarcadero_proof.fuzz.targets.placement import PLACEMENT
from embarcadero_proof.fuzz.targets.serving import SERVING
from embarcadero_proof.fuzz.targets.settings import SETTINGS
from embarcadero_proof.fuzz.targets.storage import STORAGE
from embarcadero_proof.fuzz.targets.wire import WIRE

TARGETS: Final[dict[str, Target]] = {
    target.name: target
    for target in (*WIRE, *PAYLOAD, *FABRIC, *STORAGE, *PLACEMENT, *SETTINGS, *SERVING)
}

if find_spec("pyiceberg") is not None:
    from embarcadero_proof.fuzz.targets.tier import TIER

    TARGETS.update({target.name: target for target in TIER})
