"""Where tables are, and the files of a warehouse, wherever it is: a folder, or an object store that speaks S3.

Everything goes through pyarrow's file systems, as PyIceberg sets them up from its properties (`s3.endpoint`, ...). What
may go wrong with files and catalogs is reported as errors of ours.
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
_BUSY_S: Final = 10  # how long SQLite waits for another process's transaction


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What a tiering job needs to know. `properties` are PyIceberg's, for the catalog and for files."""

    warehouse: str
    properties: dict[str, str] = field(default_factory=dict)
    hot_retention_s: int = HOT_RETENTION_S
    file_bytes: int = TIER_FILE_BYTES
    interval_s: float = TIER_INTERVAL_S
    topics: Sequence[str] = ()  # empty: all that have replicas

    @property
    def catalog(self) -> dict[str, str]:
        """Properties of the catalog."""
        return {**self.properties, "warehouse": self.warehouse}

    @classmethod
    def local(cls, folder: Path, **more: object) -> TierSettings:
        """A catalog in an SQLite file and a warehouse beside it, in a folder."""
        return cls(**{"warehouse": f"file://{folder / 'warehouse'}", "properties": sqlite_catalog(folder), **more})  # type: ignore[arg-type]

    @classmethod
    def of(cls, config: Config, data_dir: Path) -> TierSettings:
        """As configured (`tier.*`); without a warehouse or a catalog they are in the cluster's folder."""
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
    """Properties of a catalog in a folder."""
    return {"type": "sql", "uri": f"sqlite:///{folder / 'catalog.db'}?timeout={_BUSY_S}"}


# --- files ------------------------------------------------------------------------------------------------------------
Properties = Mapping[str, str]

_ALWAYS: Final = {"py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO"}
_UNAVAILABLE_HINT: Final = "check that it is up, its address, and your keys (tier.properties); then try again"

FOR_READERS: Final = {
    "s3.connect-timeout": "2",
    "s3.request-timeout": "3",
    "s3.retry-strategy-impl": "embarcadero.tier.storage.OneTry",
}
"""Properties of readers, in seconds, unless their own say otherwise. A reader has to report within `TABLE_RETRY_S` that
a store does not answer, and tries again itself: retries of the S3 client would multiply these times.
"""

_AWAY: Final = re.compile(
    r"network_connection|curlcode|http status 503|slow_?down|service_?unavailable|deadline_exceeded|timed? ?out"
    r"|(could not|couldn't|failed to|cannot|unable to) (connect|resolve)|connection (refused|reset|closed)",
    re.IGNORECASE,
)
_S3Retries: Any = getattr(pafs, "AwsStandardS3RetryStrategy", object)  # a build of pyarrow may be without S3
_S3_SCHEMES: Final = frozenset({"s3", "s3a", "s3n"})
_TROUBLES: Final = ("aws error", "google", "azure", "http", "curl", "network", "connect", "timed out", "timeout")


class OneTry(_S3Retries):  # type: ignore[misc]  # pyarrow has no types
    """Send each request to S3 once. The reader tries again itself, and reports a store that does not answer in time.

    PyIceberg imports this class by its name (FOR_READERS).
    """

    def __init__(self) -> None:
        super().__init__(max_attempts=1)


class _FileIO(PyArrowFileIO):
    """PyIceberg's way to files. It opens nothing that `Storage.check` refuses."""

    def __init__(self, properties: Properties, warehouse: str | None) -> None:
        super().__init__(dict(properties))
        self._top = None if warehouse is None else self._parts(warehouse)

    def new_input(self, location: str) -> Any:
        self.check(location)
        return super().new_input(location)

    def check(self, location: str) -> None:
        """Raise NotAvailable for what is not below the warehouse. Nothing is looked up there before that."""
        if self._top is None:
            return
        try:
            parts = self._parts(location)
        except ValueError:  # it is no location at all
            parts = []
        if ".." in parts or parts[: len(self._top)] != self._top or len(parts) == len(self._top):
            raise NotAvailable(
                f"{location} is not below the warehouse whose tables this broker reads",
                "let tier.warehouse of the cluster be that of the tiering job, or read the table itself: "
                'install "embarcadero[iceberg]"',
            )

    def _parts(self, location: str) -> list[str]:
        """Scheme, bucket and folders of a location. Links in a path of this machine are followed."""
        scheme, _, path = self.parse_location(location, self.properties)
        if scheme == "file" and ".." not in path.split("/"):
            path = os.path.realpath(path)
        return ["s3" if scheme in _S3_SCHEMES else scheme, *path.rstrip("/").split("/")]


class Storage:
    """The files of a warehouse. Two with the same properties are equal.

    With `warehouse`, only what is below that location is read: anything else is refused with NotAvailable.
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
        """The file system of a location, and its path there. BadTable for an unknown kind of location."""
        try:
            with typed_errors(location):
                self.io.check(location)
                scheme, netloc, path = self.io.parse_location(location, self.properties)
                return self.io.fs_by_scheme(scheme, netloc), path
        except (ValueError, ImportError) as error:
            problem = f"{location} is no place to read or write: {_short(error)}"
            raise BadTable(problem, "check where the table is, and tier.properties") from error

    def open(self, location: str) -> Any:
        """A file to read from anywhere in it. BadTable, if it is not there."""
        fs, path = self.place(location)
        with typed_errors(location):
            return fs.open_input_file(path)

    def create(self, location: str) -> Any:
        """A new file to write."""
        fs, path = self.place(location)
        with typed_errors(location):
            return fs.open_output_stream(path)

    def list(self, location: str) -> list[tuple[str, float]]:
        """Names of the files in a folder, and when they were last changed (seconds since 1970)."""
        fs, path = self.place(location)
        with typed_errors(location):
            found = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        files = [info for info in found if info.type == pafs.FileType.File]
        return [(info.base_name, info.mtime.timestamp() if info.mtime else 0.0) for info in files]

    def delete(self, location: str) -> None:
        """Remove a file; one that is gone already is fine."""
        fs, path = self.place(location)
        with typed_errors(location):
            try:
                fs.delete_file(path)
            except FileNotFoundError:
                return

    def sync(self, locations: Iterable[str]) -> None:
        """Have files on disk for good, with their names; an object store has them when it says so."""
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
    """Errors of Arrow, PyIceberg and the catalog's database as ours; `what` is the file or table in question."""
    try:
        yield
    except (EmbarcaderoError, CommitFailedException, NoSuchTableError):
        raise
    except FileNotFoundError as error:
        raise BadTable(f"{what} is missing: {_short(error)}", "restore it, or drop it from the table") from error
    except (SQLAlchemyError, RESTError) as error:
        raise TierUnavailable(f"the catalog of {what} can't be used: {_short(error)}", _UNAVAILABLE_HINT) from error
    except OSError as error:
        if not _is_trouble(error):
            raise BadTable(f"{what} is damaged: {_short(error)}", "restore it from a copy") from error
        raise TierUnavailable(f"{what} can't be read or written: {_short(error)}", _UNAVAILABLE_HINT) from error
    except pa.ArrowException as error:
        raise BadTable(f"{what} is damaged: {_short(error)}", "restore it from a copy") from error


@contextmanager
def reading(path: str) -> Iterator[None]:
    """The same while a file is decoded: bytes that make no sense are met with errors of every kind."""
    try:
        with typed_errors(path):
            yield
    except EmbarcaderoError:
        raise
    except (ValueError, LookupError, ArithmeticError, MemoryError, TypeError) as error:
        raise BadTable(f"{path} is damaged: {_short(error)}", "restore it from a copy") from error


def _is_trouble(error: OSError) -> bool:
    """Arrow says "OSError" to bytes that make no sense as well; those come without a number, and not from a network."""
    text = str(error).lower()
    return error.errno is not None or any(word in text for word in _TROUBLES)


def why_away(error: BaseException) -> str | None:
    """Why a store could not be reached: what its client said, without names of files. None for any other failure.

    A file that can't be opened, and a request that was refused, say nothing about the rest of the store.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    if cause is None:
        return None
    if isinstance(cause, ConnectionError | TimeoutError):
        return "no answer"
    before, mark, said = _short(cause).partition("AWS Error")
    if cause.errno is not None or not _AWAY.search(said or before):
        return None
    return f"{mark}{said}" or "no answer"


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
