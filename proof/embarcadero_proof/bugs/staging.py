"""Bugs injected into `embarcadero/staging/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import Bug

BUGS: Final = (
    Bug("published-before-decided", "a committer publishes its batches before they are decided", scope="commit"),
    Bug("decided-before-manifest", "a committer decides before its manifest is durable", scope="commit"),
    Bug("published-before-durable", "a committer publishes before the decision is durable", scope="commit"),
    Bug("done-before-published", "an epoch is done before its batches are published", scope="commit"),
    Bug("newer-manifest-published", "a committer publishes its own manifest, whatever was decided",
              scope="commit"),
    Bug("sweep-drops-decided", "the sweep gives up what is staged for writes that are open", scope="sweep"),
)  # fmt: skip
