"""Bugs injected into `embarcadero/staging/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import Bug
from embarcadero_proof.bugs.patch import Edit

_COMMIT: Final = "embarcadero.staging.commit:commit"
_COMPLETE: Final = "embarcadero.staging.commit:_complete"

BUGS: Final = (
    Bug(
        "published-before-decided", "a committer publishes its batches before they are decided", scope="commit",
        edits=(Edit(_COMMIT, "    while True:\n", "    await ledger.publish(manifest)\n    while True:\n"),),
    ),
    Bug(
        "decided-before-manifest", "a committer decides before its manifest is durable", scope="commit",
        edits=(Edit(_COMMIT, "    before, decided, data, gone =",
                    "    await ledger.decide(manifest.write, mine, (await ledger.held(manifest.write))[0].session)\n"
                    "    before, decided, data, gone ="),),
    ),
    Bug(
        "published-before-durable", "a committer publishes before the decision is durable", scope="commit",
        edits=(
            Edit(_COMPLETE, "    await ledger.settle()\n    again, _ = await ledger.held(write)\n", ""),
            Edit(_COMPLETE, "    if again.session != decided.session:\n        return False\n", ""),
        ),
    ),
    Bug(
        "done-before-published", "an epoch is done before its batches are published", scope="commit",
        edits=(Edit(_COMPLETE, "    await ledger.publish(manifest)\n",
                    "    await ledger.finish(write, decision.epoch)\n    await ledger.publish(manifest)\n"),),
    ),
    Bug(
        "newer-manifest-published", "a committer publishes its own manifest, not the decided one", scope="commit",
        edits=(Edit(_COMPLETE, "manifest is None or (manifest.epoch, manifest.digest) != wanted:",
                    "manifest is None:"),),
    ),
    Bug(
        "sweep-drops-decided", "the sweep trims batches that are staged for open writes", scope="sweep",
        edits=(Edit("embarcadero.staging.sweep:OpenWrites.horizon_us", "min([now_us, *began])", "now_us"),),
    ),
)  # fmt: skip
