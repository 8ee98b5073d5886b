"""A cluster that can be killed whole, with disks that fail on request."""

from __future__ import annotations

import msgspec

from embarcadero.demo.cluster import MortalCluster
from embarcadero.node.supervisor import UpOptions
from embarcadero_proof.faults.node import NODE_MODULE


class FaultyCluster(MortalCluster):
    """A mortal cluster whose nodes take faults (embarcadero_proof/faults)."""

    def _options(self) -> UpOptions:
        return msgspec.structs.replace(super()._options(), node_module=NODE_MODULE)
