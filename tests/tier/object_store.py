"""A real object store for tests: SeaweedFS with its S3 gateway, in one process on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pyarrow.fs as pafs

from embarcadero.node.process import ReservedPorts

_KEYS = {"accessKey": "tests", "secretKey": "tests-secret"}
_PARTS = ("master", "volume", "filer", "s3")


def weed() -> str | None:
    """The program: beside this Python, where pip puts it, or on the path."""
    return shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class ObjectStore:
    """Its address and credentials."""

    def __init__(self, port: int, command: list[str], folder: Path) -> None:
        self.port, self._command, self._folder = port, command, folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    def start(self, bucket: str) -> None:
        """Start it, and wait until it takes files in a bucket."""
        with (self._folder / "weed.log").open("ab") as out:
            self._process = subprocess.Popen(self._command, stdout=out, stderr=subprocess.STDOUT)
        _wait(self, bucket)

    def end(self) -> None:
        """Stop it, by its process id."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    @contextmanager
    def away(self, bucket: str) -> Iterator[None]:
        """Stop it: connections are refused. Then start it again, with all its files."""
        self.end()
        try:
            yield
        finally:
            self.start(bucket)

    def properties(self, **more: str) -> dict[str, str]:
        """For PyIceberg."""
        return {
            "s3.endpoint": f"http://127.0.0.1:{self.port}", "s3.access-key-id": _KEYS["accessKey"],
            "s3.secret-access-key": _KEYS["secretKey"], "s3.region": "us-east-1", **more,
        }  # fmt: skip

    def file_system(self) -> pafs.S3FileSystem:
        """For pyarrow."""
        return pafs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{self.port}", scheme="http", access_key=_KEYS["accessKey"],
            secret_key=_KEYS["secretKey"], region="us-east-1", allow_bucket_creation=True, request_timeout=2,
            connect_timeout=2,
        )  # fmt: skip

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """It takes connections and never answers."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


class Endpoint:
    """An address that clients take for an S3 store. It gives each request the same answer; None: it never answers."""

    def __init__(self, answer: str | None) -> None:
        self._answer, self._socket = answer, socket.create_server(("127.0.0.1", 0))
        self.requests = 0
        self._held: list[socket.socket] = []
        Thread(target=self._serve, daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def properties(self, **more: str) -> dict[str, str]:
        """For PyIceberg, with keys and short timeouts."""
        return {
            "s3.endpoint": self.url, "s3.access-key-id": "a", "s3.secret-access-key": "b", "s3.region": "eu-west-1",
            "s3.connect-timeout": "1", "s3.request-timeout": "1", **more,
        }  # fmt: skip

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self.requests += 1
                if self._answer is None:
                    self._held.append(client)
                    continue
                client.recv(65_536)
                client.sendall(f"HTTP/1.1 {self._answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                client.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (*self._held, self._socket):
            each.close()


def available() -> bool:
    """Whether the program is installed."""
    return weed() is not None


@contextmanager
def object_store(folder: Path, bucket: str) -> Iterator[ObjectStore]:
    """Start it with an empty bucket; stop it by its process id."""
    reserved = ReservedPorts(len(_PARTS) * 2)
    ports = range(reserved.first, reserved.first + len(_PARTS) * 2)
    config = folder / "s3.json"
    actions = ["Admin", "Read", "Write", "List"]
    config.write_text(json.dumps({"identities": [{"name": "tests", "credentials": [_KEYS], "actions": actions}]}))
    options = [f"-{part}.port={ports[n]}" for n, part in enumerate(_PARTS)]
    options += [f"-{part}.port.grpc={ports[len(_PARTS) + n]}" for n, part in enumerate(_PARTS)]
    command = [
        weed() or "weed", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3",
        f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=3",
        "-master.volumeSizeLimitMB=64", *options,
    ]  # fmt: skip
    store = ObjectStore(ports[3], command, folder)
    try:
        store.start(bucket)
        yield store
    finally:
        store.end()
        reserved.release()


def _wait(store: ObjectStore, bucket: str) -> None:
    files, deadline = store.file_system(), time.monotonic() + 30
    while True:
        try:
            files.create_dir(bucket)
            with files.open_output_stream(f"{bucket}/ready") as stream:
                stream.write(b"yes")
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
