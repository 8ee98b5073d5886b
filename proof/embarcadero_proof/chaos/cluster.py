"""A cluster that can be killed whole, with disks that fail on request."""

from __future__ import annotations

from embarcadero.node.local import RestartableCluster
from embarcadero_proof.faults.node import NODE_MODULE


class FaultyCluster(RestartableCluster):
    """A restartable cluster whose nodes take faults (embarcadero_proof/faults)."""

    node_module = NODE_MODULE
