"""Finding a Java that Spark can use, and saying what to install when there is none."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from embarcadero.errors import NotAvailable

JAVA_VERSION_MIN: Final = 17
INSTALL: Final = (
    "install Java 17 or 21, for example `apt install openjdk-17-jre-headless` or `brew install openjdk@17`, "
    "and set JAVA_HOME to its folder if it is not found by itself"
)
FOLDERS: Final = (
    "/usr/lib/jvm", "/Library/Java/JavaVirtualMachines", "/opt/homebrew/opt", "/usr/local/opt",
    "~/.sdkman/candidates/java",
)  # fmt: skip
"""Where installers put Java."""
_ASK_S: Final = 10.0  # for a Java that tells its version only when it runs


def find_java(environ: Mapping[str, str] | None = None, folders: Sequence[str] = FOLDERS) -> Path:
    """The home of a Java that is new enough: of JAVA_HOME, the PATH, or the usual folders. Raises NotAvailable."""
    known = os.environ if environ is None else environ
    too_old: dict[Path, int] = {}
    for home in _candidates(known, folders):
        version = java_version(home)
        if version is not None and version >= JAVA_VERSION_MIN:
            return home
        if version is not None:
            too_old[home] = version
    if too_old:
        found = ", ".join(f"Java {version} in {home}" for home, version in too_old.items())
        raise NotAvailable(f"Spark needs Java {JAVA_VERSION_MIN} or newer, and there is only {found}", INSTALL)
    raise NotAvailable(f"Spark needs Java {JAVA_VERSION_MIN} or newer, and none is installed", INSTALL)


def _candidates(environ: Mapping[str, str], folders: Sequence[str]) -> Iterator[Path]:
    """Homes to look at, best first."""
    if environ.get("JAVA_HOME"):
        yield Path(environ["JAVA_HOME"])
    if on_path := shutil.which("java", path=environ.get("PATH", "")):
        yield Path(on_path).resolve().parent.parent
    for folder in folders:
        where = Path(folder).expanduser()
        for home in sorted(where.iterdir()) if where.is_dir() else []:
            inner = home / "libexec" / "openjdk.jdk" / "Contents" / "Home"
            yield from (each for each in (home, home / "Contents" / "Home", inner) if (each / "bin" / "java").exists())


def java_version(home: Path) -> int | None:
    """Its feature version (8, 17, 21); None if there is no Java."""
    program = home / "bin" / "java"
    if not program.exists():
        return None
    release = home / "release"
    if release.is_file() and (version := _parsed(release.read_text(errors="replace"))) is not None:
        return version
    try:
        asked = subprocess.run([str(program), "-version"], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _parsed(asked.stderr)


def _parsed(text: str) -> int | None:
    """17 of `JAVA_VERSION="17.0.15"` or `openjdk version "17.0.15"`; 8 of "1.8.0_402"."""
    found = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None
