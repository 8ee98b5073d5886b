"""Changes of a table by other programs: they rewrite its files, or add rows of their own."""

from __future__ import annotations

import secrets
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import parquet_files_to_data_files


def add(table: Any, rows: pa.Table, *, instead: bool = False) -> None:
    """Commit a file with these rows, as any engine would; `instead` replaces all existing rows."""
    path = f"{table.location()}/data/{secrets.token_hex(8)}.parquet"
    paths = [path] if rows.num_rows else []
    for each in paths:
        pq.write_table(rows, each.removeprefix("file://"), row_group_size=1 << 30)
    with table.transaction() as transaction, transaction.update_snapshot().overwrite() as change:
        for task in table.scan().plan_files() if instead else ():
            change.delete_data_file(task.file)
        for file in parquet_files_to_data_files(table.io, transaction.table_metadata, iter(paths)):
            change.append_data_file(file)


def compact(table: Any) -> None:
    """Rewrite all rows into one file, sorted as before."""
    order = [("_index", "ascending"), ("_seq", "ascending")]
    add(table, table.scan().to_arrow().sort_by(order), instead=True)
