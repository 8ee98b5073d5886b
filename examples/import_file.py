"""Import a file, each line as a record, exactly once.

    python examples/import_file.py FILE [ADDRESS]      # without an address: a private cluster

Kill the program at any moment and start it again: every line is in the topic once, in the order of the file.

The session of the publisher makes this work. Its name is the hash of the file, and the chunk with number n of the file
becomes the batch with sequence n of the session. The log recognizes a batch that it already has. A program that starts
again asks for the next sequence, and continues with that chunk. If two programs import the same file, the second one
fences the first one.

A second import of the same file adds nothing while the topic remembers the session: a day after its last batch, or
`session_ttl_s` of the topic.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

import embarcadero as emb

TOPIC = "lines"
CHUNK_BYTES = 256 * 1024  # the same in every run: chunks are the batches of the session


def chunks(file: BinaryIO) -> Iterator[list[bytes]]:
    """Split a file into lists of lines. The same file gives the same lists."""
    while lines := file.readlines(CHUNK_BYTES):
        yield lines


def import_file(log: emb.Log, path: Path) -> tuple[int, int]:
    """Publish the chunks that the topic does not have yet. Return how many it had, and how many were added."""
    with path.open("rb") as file:
        session = f"import-{hashlib.file_digest(file, 'sha256').hexdigest()}"
        file.seek(0)
        with log.publisher(TOPIC, session=session, ack=2) as publisher:  # closing waits until all chunks are on disk
            before = publisher.next_session_seq()
            added = 0
            for number, lines in enumerate(chunks(file)):
                if number < before:
                    continue
                values = pa.array([line.rstrip(b"\r\n") for line in lines], pa.binary())
                batch = pa.record_batch({"value": values})  # a record batch stays one batch
                publisher.publish(batch, session_seq=number)
                added += 1
    return before, added


def main(path: str, address: str = "") -> None:
    with emb.connect(address) if address else emb.local(brokers=2, replicas=1) as log:
        if TOPIC not in [topic.name for topic in log.topics()]:
            log.create_topic(TOPIC)
        before, added = import_file(log, Path(path))
        print(f"{path}: {added} chunks were added, {before} were in the topic already")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("Usage: python examples/import_file.py FILE [ADDRESS]")
    main(*sys.argv[1:])
