"""The location of tables, and the files of a warehouse: a folder, or an object store with the S3 protocol.

All access uses pyarrow's file systems, which PyIceberg configures from its properties (`s3.endpoint`, ...). Failures of
files and catalogs are converted to Embarcadero's errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from embarcadero.config import Config
from embarcadero.config.secrets import parse_properties
from embarcadero.errors import BadTable, EmbarcaderoError, NotAvailable, TierUnavailable
from embarcadero.limits import HOT_RETENTION_S, TIER_FILE_BYTES, TIER_INTERVAL_S

try:
    from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, RESTError
    from pyiceberg.io.pyarrow import PyArrowFileIO
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as missing:  # pragma: no cover - the extra is there in tests
    raise NotAvailable(f"tables need PyIceberg: {missing}", 'pip install "embarcadero[iceberg]"') from None

NAMESPACE: Final = "embarcadero"
_BUSY_S: Final = 10  # the time that SQLite waits for another process's transaction


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The settings of a tier job. `properties` are PyIceberg's, for the catalog and for files."""

    warehouse: str
    properties: dict[str, str] = field(default_factory=dict)
    hot_retention_s: int = HOT_RETENTION_S
    file_bytes: int = TIER_FILE_BYTES
    interval_s: float = TIER_INTERVAL_S
    topics: Sequence[str] = ()  # empty: all topics with replicas

    @property
    def catalog(self) -> dict[str, str]:
        """Properties of the catalog."""
        return {**self.properties, "warehouse": self.warehouse}

    @classmethod
    def local(cls, folder: Path, **more: object) -> TierSettings:
        """Use a catalog in an SQLite file, and a warehouse beside it, in a folder."""
        return cls(**{"warehouse": f"file://{folder / 'warehouse'}", "properties": sqlite_catalog(folder), **more})  # type: ignore[arg-type]

    @classmethod
    def of(cls, config: Config, data_dir: Path) -> TierSettings:
        """Take the configuration (`tier.*`); the default warehouse and catalog are in the cluster's folder."""
        configured, folder = config.tier, data_dir / "tier"
        properties = parse_properties(configured.properties)
        if "type" not in properties and "uri" not in properties:
            properties |= sqlite_catalog(folder)
        return cls(
            warehouse=configured.warehouse or f"file://{folder / 'warehouse'}",
            properties=properties,
            hot_retention_s=int(configured.hot_retention_s),
            file_bytes=configured.file_bytes,
            interval_s=configured.interval_s,
            topics=configured.topics,
        )


def sqlite_catalog(folder: Path) -> dict[str, str]:
    """Properties of an SQLite catalog in a folder."""
    return {"type": "sql", "uri": f"sqlite:///{folder / 'catalog.db'}?timeout={_BUSY_S}"}


# --- files ------------------------------------------------------------------------------------------------------------
Properties = Mapping[str, str]

_ALWAYS: Final = {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}
_UNAVAILABLE_HINT: Final = "check that it is up, and check its address and your keys (tier.properties); then try again"

FOR_READERS: Final = {
    "s3.connect-timeout": "2",
    "s3.request-timeout": "3",
    "s3.retry-strategy-impl": "embarcadero.tier.storage.OneTry",
}
"""Default properties of readers, in seconds. A reader has to report within `TABLE_RETRY_S` that a store does not
answer, and tries again itself: retries of the S3 client would multiply these times.
"""

_AWAY: Final = re.compile(
    r"network_connection|curlcode|http status 503|slow_?down|service_?unavailable|deadline_exceeded|timed? ?out"
    r"|(could not|couldn't|failed to|cannot|unable to) (connect|resolve)|connection (refused|reset|closed)",
    re.IGNORECASE,
)
_S3Retries: Any = getattr(pafs, "AwsStandardS3RetryStrategy", object)  # pyarrow may be built without S3
_S3_SCHEMES: Final = frozenset({"s3", "s3a", "s3n"})
_TROUBLES: Final = ("aws error", "google", "azure", "http", "curl", "network", "connect", "timed out", "timeout")


class OneTry(_S3Retries):  # type: ignore[misc]  # pyarrow has no types
    """Send each request to S3 once. The reader tries again itself, and reports a store that does not answer in time.

    PyIceberg imports this class by its name (FOR_READERS).
    """

    def __init__(self) -> None:
        super().__init__(max_attempts=1)


class _FileIO(PyArrowFileIO):
    """PyIceberg's file access. It opens only locations below the warehouse."""

    def __init__(self, properties: Properties, warehouse: str | None) -> None:
        super().__init__(dict(properties))
        self._top = None if warehouse is None else self._parts(warehouse)

    def new_input(self, location: str) -> Any:
        self.check(location)
        return super().new_input(location)

    def check(self, location: str) -> None:
        """Raise NotAvailable for a location outside the warehouse, before any access to it."""
        if self._top is None:
            return
        try:
            parts = self._parts(location)
        except ValueError:  # not a location at all
            parts = []
        if ".." in parts or parts[: len(self._top)] != self._top or len(parts) == len(self._top):
            raise NotAvailable(
                f"{location} is outside the warehouse whose tables this broker reads",
                "set tier.warehouse of the cluster to the warehouse of the tier job, or read the table in the client: "
                'install "embarcadero[iceberg]"',
            )

    def _parts(self, location: str) -> list[str]:
        """Scheme, bucket and folders of a location. Symbolic links in a local path are resolved."""
        scheme, _, path = self.parse_location(location, self.properties)
        if scheme == "file" and ".." not in path.split("/"):
            path = os.path.realpath(path)
        return ["s3" if scheme in _S3_SCHEMES else scheme, *path.rstrip("/").split("/")]


class Storage:
    """The files of a warehouse. Two storages with the same properties are equal.

    With `warehouse`, only files below that location are read; others are refused with NotAvailable.
    """

    def __init__(self, properties: Properties, warehouse: str | None = None) -> None:
        self.properties = {**properties, **_ALWAYS}
        self.io = _FileIO(self.properties, warehouse)
        self._key = (warehouse, *sorted(self.properties.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def place(self, location: str) -> tuple[pafs.FileSystem, str]:
        """Return the file system of a location, and the path in it. BadTable for an unknown kind of location."""
        try:
            with typed_errors(location):
                self.io.check(location)
                scheme, netloc, path = self.io.parse_location(location, self.properties)
                return self.io.fs_by_scheme(scheme, netloc), path
        except (ValueError, ImportError) as error:
            problem = f"{location} is not a location to read or write: {_short(error)}"
            raise BadTable(problem, "check the location of the table, and tier.properties") from error

    def open(self, location: str) -> Any:
        """Open a file for random reads. BadTable if it does not exist."""
        fs, path = self.place(location)
        with typed_errors(location):
            return fs.open_input_file(path)

    def create(self, location: str) -> Any:
        """Create a file for writing."""
        fs, path = self.place(location)
        with typed_errors(location):
            return fs.open_output_stream(path)

    def list(self, location: str) -> list[tuple[str, float]]:
        """Names of the files in a folder, and the times of their last change (seconds since 1970)."""
        fs, path = self.place(location)
        with typed_errors(location):
            found = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        files = [info for info in found if info.type == pafs.FileType.File]
        return [(info.base_name, info.mtime.timestamp() if info.mtime else 0.0) for info in files]

    def delete(self, location: str) -> None:
        """Remove a file; a missing file is fine."""
        fs, path = self.place(location)
        with typed_errors(location):
            try:
                fs.delete_file(path)
            except FileNotFoundError:
                return

    def sync(self, locations: Iterable[str]) -> None:
        """Sync files and their names to disk. An object store is durable once it has answered."""
        folders = set()
        for location in locations:
            scheme, _, path = self.io.parse_location(location, self.properties)
            if scheme == "file":
                with typed_errors(location):
                    _sync(path)
                folders.add(str(Path(path).parent))
        for folder in folders:
            _sync(folder)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Convert errors of Arrow, PyIceberg and the catalog's database; `what` names the file or table."""
    try:
        yield
    except (EmbarcaderoError, CommitFailedException, NoSuchTableError):
        raise
    except FileNotFoundError as error:
        raise BadTable(f"{what} is missing: {_short(error)}", "restore it, or drop it from the table") from error
    except (SQLAlchemyError, RESTError) as error:
        raise TierUnavailable(f"the catalog of {what} cannot be used: {_short(error)}", _UNAVAILABLE_HINT) from error
    except OSError as error:
        if not _is_trouble(error):
            raise BadTable(f"{what} is damaged: {_short(error)}", "restore it from a copy") from error
        raise TierUnavailable(f"{what} cannot be read or written: {_short(error)}", _UNAVAILABLE_HINT) from error
    except pa.ArrowException as error:
        raise BadTable(f"{what} is damaged: {_short(error)}", "restore it from a copy") from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert errors while a file is decoded: invalid bytes raise errors of every kind."""
    try:
        with typed_errors(path):
            yield
    except EmbarcaderoError:
        raise
    except (ValueError, LookupError, ArithmeticError, MemoryError, TypeError) as error:
        raise BadTable(f"{path} is damaged: {_short(error)}", "restore it from a copy") from error


def _is_trouble(error: OSError) -> bool:
    """Arrow also raises OSError for invalid bytes; such errors have no errno, and no text of a network error."""
    text = str(error).lower()
    return error.errno is not None or any(word in text for word in _TROUBLES)


def why_away(error: BaseException) -> str | None:
    """The reason why a store could not be reached: its client's message, without file names. None for other failures.

    A file that cannot be opened, or a refused request, gives no information about the rest of the store.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    if cause is None:
        return None
    if isinstance(cause, ConnectionError | TimeoutError):
        return "no answer"
    before, mark, message = _short(cause).partition("AWS Error")
    if cause.errno is not None or not _AWAY.search(message or before):
        return None
    return f"{mark}{message}" or "no answer"


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
