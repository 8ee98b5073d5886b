"""A node process with faults: the program that a supervisor of the proof starts instead of the product's.

The nodes of a cluster started with `UpOptions(node_module=NODE_MODULE)` run `main` below. It gives their roles the
step faults that the environment requests (steps.py) and disks that fail on request (disks.py).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from embarcadero.cli.processes import SURROUNDINGS
from embarcadero.node import node
from embarcadero_proof.faults.disks import failing_disk
from embarcadero_proof.faults.steps import steps_of

NODE_MODULE: Final = __name__ if __name__ != "__main__" else "embarcadero_proof.faults.node"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node as the product does, with faults."""
    return node.main(arguments, SURROUNDINGS._replace(steps=steps_of, disk=failing_disk))


if __name__ == "__main__":
    sys.exit(main())
