"""A Kafka broker on this machine: one node in KRaft mode, started from the jars of Maven Central."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.matrix.__main__ import BUILD

HOME: Final = BUILD.parent / "peers"
POM: Final = Path(__file__).with_name("pom.xml")
CONNECTOR: Final = (
    "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",  # the newest one there is
    "org.apache.kafka:kafka-clients:3.9.1",
    "org.apache.commons:commons-pool2:2.12.1",
)
_GET: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1"
_START_S: Final = 60
_SETTINGS: Final = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={folder}/data
offsets.topic.replication.factor=1
num.partitions={partitions}
"""


@dataclass(frozen=True, slots=True)
class Kafka:
    """A broker that runs."""

    address: str
    jars: Path

    def fill(self, topic: str, records: int, size: int) -> None:
        """Publish records of random bytes with Kafka's own tool; return when all are acked."""
        _java(
            self.jars, "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", str(records),
            "--record-size", str(size), "--throughput", "-1", "--producer-props",
            f"bootstrap.servers={self.address}", "acks=all", "batch.size=262144", "linger.ms=5",
        )  # fmt: skip


def download() -> tuple[Path, list[Path]]:
    """The folder with the broker's jars, and the jars of Spark's connector; they are downloaded once."""
    jars, connector = HOME / "kafka", HOME / "connector"
    if not jars.is_dir():
        _maven("dependency:copy-dependencies", f"-DoutputDirectory={jars}", "-f", str(POM))
    for name in CONNECTOR:
        _, artifact, version = name.split(":")
        if not (connector / f"{artifact}-{version}.jar").is_file():
            _maven(f"{_GET}:get", "-Dtransitive=false", f"-Dartifact={name}")
            _maven(f"{_GET}:copy", f"-Dartifact={name}", f"-DoutputDirectory={connector}")
    return jars, sorted(connector.glob("*.jar"))


@contextmanager
def broker(jars: Path, folder: Path, partitions: int) -> Iterator[Kafka]:
    """A broker for as long as the block lasts, with its data in a folder."""
    port, controller = _free_port(), _free_port()
    settings = folder / "server.properties"
    folder.mkdir(parents=True, exist_ok=True)
    settings.write_text(_SETTINGS.format(port=port, controller=controller, folder=folder, partitions=partitions))
    _java(
        jars, "kafka.tools.StorageTool", "format", "--cluster-id", "MkU3OEVBNTcwNTJENDM2Qg", "--config", str(settings)
    )
    command = ["java", "-Xmx1g", "-cp", f"{jars}/*", "kafka.Kafka", str(settings)]
    with (folder / "server.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_for(port, process)
        yield Kafka(f"127.0.0.1:{port}", jars)
    finally:
        process.terminate()
        process.wait(_START_S)


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("Kafka does not start: see server.log")
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _java(jars: Path, main: str, *arguments: str) -> None:
    subprocess.run(["java", "-cp", f"{jars}/*", main, *arguments], check=True, stdout=subprocess.DEVNULL)


def _maven(*arguments: str) -> None:
    subprocess.run(["mvn", "-q", *arguments], check=True)
