"""A REST catalog for Iceberg tables, for trying things out: python examples/rest_catalog.py [folder] [port]

It keeps its state in an SQLite file in the folder, and prints its address. It implements the calls that Embarcadero,
PyIceberg and Spark need to make, load and commit tables. It has no access control: use a real catalog for real tables.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from pyiceberg.catalog.rest import CreateTableRequest, TableResponse
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import CommitTableRequest, CommitTableResponse, Table

CODES = {
    CommitFailedException: 409, NamespaceAlreadyExistsError: 409, TableAlreadyExistsError: 409,
    NoSuchNamespaceError: 404, NoSuchTableError: 404,
}  # fmt: skip
TABLES = r"/v1/namespaces/([^/]+)/tables"


class RestCatalog(ThreadingHTTPServer):
    """Serves a catalog at an address of this machine."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(("127.0.0.1", port), Handler)
        warehouse = f"file://{folder.absolute() / 'warehouse'}"
        self.tables = SqlCatalog("rest", uri=f"sqlite:///{folder / 'rest.db'}", warehouse=warehouse)
        self.lock = Lock()  # one request at a time: SQLite would refuse some

    @property
    def uri(self) -> str:
        """Configuration for clients."""
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: RestCatalog

    def answer(self) -> None:
        """Execute a request and answer as the REST specification requires."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode()
        try:
            with self.server.lock:
                found: Any = self.done(self.path.partition("?")[0].rstrip("/"), body)
            code = 404 if found is None else 200
        except tuple(CODES) as error:
            code = next(code for kind, code in CODES.items() if isinstance(error, kind))
            found = {"error": {"message": str(error), "type": type(error).__name__, "code": code}}
        text = (found if isinstance(found, str) else json.dumps(found or {})).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - names of the base class

    def done(self, path: str, body: str) -> object:
        """The answer to a request; None if there is no such thing here."""
        catalog, reading = self.server.tables, self.command == "GET"
        if path == "/v1/config":
            return {"defaults": {}, "overrides": {}}
        if path == "/v1/namespaces":
            if not reading:
                catalog.create_namespace(tuple(json.loads(body)["namespace"]))
            return {"namespaces": catalog.list_namespaces()}
        if (names := re.fullmatch(r"/v1/namespaces/([^/]+)", path)) is not None:
            return {"namespace": [names[1]], "properties": catalog.load_namespace_properties(names[1])}
        if (names := re.fullmatch(TABLES, path)) is not None:
            if reading:
                known = catalog.list_tables(names[1])
                return {"identifiers": [{"namespace": name[:-1], "name": name[-1]} for name in known]}
            asked = json.dumps({"location": None, "partition-spec": None, "write-order": None, **json.loads(body)})
            return described(self.create(names[1], CreateTableRequest.model_validate_json(asked)))
        if (names := re.fullmatch(TABLES + "/([^/]+)", path)) is not None:
            return self.table(f"{names[1]}.{names[2]}", body)
        return None

    def create(self, namespace: str, ask: CreateTableRequest) -> Table:
        """Make a table."""
        spec = {} if ask.partition_spec is None else {"partition_spec": ask.partition_spec}
        name = f"{namespace}.{ask.name}"
        return self.server.tables.create_table(
            name, ask.table_schema, location=ask.location, properties=ask.properties, **spec
        )

    def table(self, name: str, body: str) -> object:
        """Load, commit or drop a table."""
        catalog = self.server.tables
        if self.command == "DELETE":
            catalog.drop_table(name)
            return {}
        table = catalog.load_table(name)
        if self.command == "GET":
            return described(table)
        ask = CommitTableRequest.model_validate_json(body)
        done: CommitTableResponse = catalog.commit_table(table, ask.requirements, ask.updates)
        return done.model_dump_json(by_alias=True)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name in the base class
        """Log nothing."""


def described(table: Table) -> str:
    """A table in the form for clients."""
    answer = TableResponse(**{"metadata-location": table.metadata_location, "metadata": table.metadata})
    return answer.model_dump_json(by_alias=True)


def main() -> None:
    """Serve until Ctrl-C."""
    folder, port = [*sys.argv[1:], *["catalog", "8181"][len(sys.argv) - 1 :]]
    with RestCatalog(Path(folder), int(port)) as server:
        print(server.uri, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
