"""The wheel has the product, and nothing that proves it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = ("src", "native", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def test_users_install_the_product_only(tmp_path: Path) -> None:
    """The two packages of the product with their data, and no proof, no tests."""
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.so"))
        else:
            shutil.copy(source, tmp_path / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "made", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "made").glob("embarcadero-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]

    assert {name.partition("/")[0] for name in names} == {"embarcadero", "pyspark_embarcadero"}
    assert {"embarcadero/py.typed", "embarcadero/spark/log4j2.properties"} <= {*names}
    assert not {name.split("/")[1] for name in names} & {"sim", "chaos", "fuzz", "bench", "bugs", "faults", "lab"}
