"""Regions as files: names, space, and damaged files."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.errors import BadName, BadRegion, FabricFull
from embarcadero.fabric.layout import RegionKind
from embarcadero.fabric.region import Shape, check_name
from embarcadero.fabric.shared import SharedFabric

GENERATION = 7
SHAPE = Shape(RegionKind.LOG, 8192, slots=2, slot_bytes=4096, owner=3, incarnation=5)


@pytest.fixture
def fabric(tmp_path: Path) -> SharedFabric:
    return SharedFabric(tmp_path / "fabric", GENERATION)


BAD_NAMES = [
    "",
    "/",
    "/etc/passwd",
    "..",
    "../x",
    "a/../b",
    "a//b",
    "a/",
    ".hidden",
    "a/.b",
    "a b",
    "a\0b",
    "a\n",
    "é",
    "A",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names_are_refused(fabric: SharedFabric, name: str) -> None:
    """No call accepts a name that leads out of the folder, is hidden, or is not a plain name."""
    for call in (lambda: fabric.create(name, SHAPE), lambda: fabric.attach(name)):
        with pytest.raises(BadName, match="not allowed"):
            call()
    with pytest.raises(BadName):
        fabric.exists(name)
    with pytest.raises(BadName):
        fabric.remove(name)


@settings(deadline=None, max_examples=300)
@given(name=st.text(alphabet="ab./\\~-_\0 0", max_size=12))
def test_every_allowed_name_stays_inside(name: str) -> None:
    """Whatever name is allowed, its file lies below the fabric's folder, and is not hidden."""
    try:
        check_name(name)
    except BadName:
        return
    folder = Path("/fabric")
    path = (folder / name).resolve()
    assert path.is_relative_to(folder)
    assert path != folder
    assert not any(part.startswith(".") for part in path.parts)


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let no file grow beyond 1 MiB, as on a full memory file system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
def test_no_space_is_an_immediate_typed_error(fabric: SharedFabric) -> None:
    """When memory is short, creating fails with the remedy, and leaves nothing behind."""
    with pytest.raises(FabricFull, match=r"no space for region big \(2\.0 MiB\).*larger"):
        fabric.create("big", Shape(RegionKind.LOG, 2 << 20))
    assert list(fabric.folder.iterdir()) == []
    assert fabric.create("small", SHAPE).shape == SHAPE


def blocks(fabric: SharedFabric, kind: RegionKind) -> int:
    size = 4 << 20
    fabric.create(f"region-{int(kind)}", Shape(kind, size))
    return (fabric.folder / f"region-{int(kind)}").stat().st_blocks * 512


@pytest.mark.parametrize("kind", [kind for kind in RegionKind if kind != RegionKind.CHECKPOINT])
def test_regions_have_their_memory_immediately(fabric: SharedFabric, kind: RegionKind) -> None:
    """They are allocated on creation: a full file system is an error then, and no SIGBUS later."""
    assert blocks(fabric, kind) >= 4 << 20


def test_checkpoints_are_sparse_and_reserve_the_rows_they_use(
    fabric: SharedFabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large table that is mostly unused takes no memory for the rest; when memory runs out, the error is typed."""
    assert blocks(fabric, RegionKind.CHECKPOINT) < 1 << 20
    region = fabric.attach(f"region-{int(RegionKind.CHECKPOINT)}", writable=True)
    region.reserve(1 << 20, 1 << 20)
    assert 1 << 20 <= (fabric.folder / region.name).stat().st_blocks * 512 < 2 << 20

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FabricFull, match="no space"):
        region.reserve(2 << 20, 1 << 20)
    fabric.remove(region.name)
    with pytest.raises(BadRegion, match="removed"):
        region.reserve(0, 1)


def test_only_the_region_is_left_behind(fabric: SharedFabric) -> None:
    """Creating leaves one file, readable by its owner only; so does creating a region that exists."""
    fabric.create("a/b", SHAPE)
    with pytest.raises(BadRegion, match="exists already"):
        fabric.create("a/b", SHAPE)
    files = [path for path in fabric.folder.rglob("*") if path.is_file()]
    assert files == [fabric.folder / "a" / "b"]
    assert files[0].stat().st_mode & 0o777 == 0o600


def test_hidden_files_are_no_regions(fabric: SharedFabric) -> None:
    """The draft of a process that died while it made a region is not listed."""
    fabric.create("a", SHAPE)
    (fabric.folder / ".making-0").write_bytes(b"")
    assert fabric.names() == ["a"]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 4096, 8191])
def test_a_truncated_file_is_refused(fabric: SharedFabric, size: int) -> None:
    """A region cut to any size, even to nothing, is a typed error."""
    fabric.create("a", SHAPE)
    path = fabric.folder / "a"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BadRegion, match="bytes"):
        fabric.attach("a")


def test_other_kinds_of_files_are_refused(fabric: SharedFabric, tmp_path: Path) -> None:
    """Folders, links that lead outside, and regions below a region are typed errors."""
    fabric.create("a", SHAPE)
    (fabric.folder / "folder").mkdir()
    (tmp_path / "elsewhere").write_bytes((fabric.folder / "a").read_bytes())
    (fabric.folder / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("folder", "link", "a/below"):
        with pytest.raises(BadRegion, match=f"region {name}"):
            fabric.attach(name)


def test_a_folder_that_does_not_exist_is_empty(fabric: SharedFabric) -> None:
    """Before anything was made there is nothing, and removing is fine."""
    fabric.remove("a")
    assert fabric.names() == []
    assert not fabric.exists("a")
    assert not fabric.folder.exists()


def test_closing_leaves_views_alone(fabric: SharedFabric) -> None:
    """Closing a region while views of it live is allowed: they stay readable, and the mapping goes with the last."""
    region = fabric.create("a", SHAPE)
    region.data[4096:] = 9
    view = region.data[4096:]
    region.close()
    region.close()
    gc.collect()
    assert view.tolist() == [9] * 4096
    assert len(region.data) == 0


def test_removing_leaves_mappings_alone(fabric: SharedFabric) -> None:
    """Processes that mapped a region keep it when it is removed; its folder goes with the last region."""
    region = fabric.create("a/b", SHAPE)
    fabric.create("a/c", SHAPE)
    fabric.remove("a/b")
    region.data[200] = 1
    assert int(region.data[200]) == 1
    assert fabric.names() == ["a/c"]
    fabric.remove("a/c")
    assert list(fabric.folder.iterdir()) == []


def test_readers_cannot_write(fabric: SharedFabric) -> None:
    """Attached without `writable`, memory is read-only."""
    fabric.create("a", SHAPE)
    region = fabric.attach("a")
    with pytest.raises(ValueError, match="read-only"):
        region.data[200] = 1


def test_huge_pages_are_only_advice(tmp_path: Path) -> None:
    """A file system without huge pages makes no difference but speed."""
    fabric = SharedFabric(tmp_path, GENERATION, hugepages=True)
    region = fabric.create("a", Shape(RegionKind.LOG, 4 << 20))
    region.data[-1] = 5
    assert int(fabric.attach("a").data[-1]) == 5


OTHER_PROCESS = """
import sys
from pathlib import Path
from embarcadero.fabric.shared import SharedFabric
region = SharedFabric(Path(sys.argv[1]), 7).attach("shared/region", writable=True)
region.data[300:310] = region.data[200:210] * 2
region.flush(300, 10)
"""


def test_other_processes_share_the_memory(fabric: SharedFabric) -> None:
    """A store by one process is loaded by another, both ways."""
    region = fabric.create("shared/region", SHAPE)
    region.data[200:210] = np.arange(10)
    region.flush(200, 10)
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(fabric.folder)], check=True, timeout=60)
    region.invalidate(300, 10)
    assert region.data[300:310].tolist() == [2 * n for n in range(10)]


# --- spares -----------------------------------------------------------------------------------------------------------
def _keep_all(fabric: SharedFabric, bytes_max: int = 1 << 20) -> int:
    made = 0
    while fabric.keep_spares("epoch-1", bytes_max):
        made += 1
    return made


def _open_files(fabric: SharedFabric) -> int:
    """How many files of the fabric, named or not, this process has open; other threads may have others."""
    there = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            there += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{fabric.folder}/")
    return there


def test_spares_become_regions_like_any_other(fabric: SharedFabric) -> None:
    """As many as there are regions below the folder, of their sizes; no process sees them before they have a name."""
    ring = Shape(RegionKind.RESULTS, 4096, slots=8, slot_bytes=64)
    for name, shape in {"log": SHAPE, "results-0": ring, "results-1": ring}.items():
        fabric.create(f"epoch-1/{name}", shape)
    fabric.create("epoch-1/checkpoint-0", Shape(RegionKind.CHECKPOINT, 4096))
    assert _keep_all(fabric) == 3
    assert len(fabric.names()) == 4
    made = fabric.create("epoch-2/results-0", ring)
    made.data[200] = 9
    seen = SharedFabric(fabric.folder, GENERATION).attach("epoch-2/results-0")
    assert (seen.shape, int(seen.data[200]), int(seen.data[201:].sum())) == (ring, 9, 0)
    with pytest.raises(BadRegion, match="exists already"):
        fabric.create("epoch-2/results-0", ring)
    fabric.create("epoch-2/results-1", ring)
    assert _keep_all(fabric) == 2


def test_spares_are_bounded_and_given_back(fabric: SharedFabric) -> None:
    """No more bytes than allowed; none of unused sizes; without the folder, none."""
    for number in range(4):
        fabric.create(f"epoch-1/order-{number}", SHAPE)
    fabric.create("epoch-1/frontiers", Shape(RegionKind.SEQUENCER_FRONTIERS, 4096))
    assert not fabric.keep_spares("epoch-7", 1 << 20)
    before = _open_files(fabric)
    assert _keep_all(fabric, 4096 + 2 * SHAPE.size) == 3
    assert _open_files(fabric) >= before + 3
    fabric.give_up_spares()
    gc.collect()
    assert _open_files(fabric) == before


@pytest.mark.parametrize("spare", [False, True])
def test_huge_pages_are_advised_before_memory_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: bool
) -> None:
    """Later advice changes nothing. The region has all its memory afterwards, as without advice."""
    advised: list[tuple[int, int]] = []

    class Watched(mmap.mmap):
        def __new__(cls, fd: int, *arguments: int, **options: int) -> Watched:
            made = super().__new__(cls, fd, *arguments, **options)
            made.fd = os.dup(fd)  # type: ignore[attr-defined]
            return made

        def madvise(self, option: int, *more: int) -> None:
            advised.append((option, os.fstat(self.fd).st_blocks))  # type: ignore[attr-defined]
            super().madvise(option, *more)

    fabric = SharedFabric(tmp_path, GENERATION, hugepages=True)
    monkeypatch.setattr("embarcadero.fabric.shared.mmap.mmap", Watched)
    shape = Shape(RegionKind.LOG, 4 << 20, slots=2, slot_bytes=2 << 20, owner=3, incarnation=5)
    if spare:
        assert fabric._make_spare(shape.size)
    fabric.create("log", shape)

    assert advised[0] == (mmap.MADV_HUGEPAGE, 0)
    assert (tmp_path / "log").stat().st_blocks * 512 >= shape.size
