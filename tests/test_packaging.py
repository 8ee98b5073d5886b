"""The published files: the wheel, its metadata, and the container that needs only the wheel."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import embarcadero as emb
from embarcadero.cli.main import app
from embarcadero.config.sources import resolve
from embarcadero.config.table import KEYS
from embarcadero.limits import GIB

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
VARIABLES = {name for key in KEYS.values() for name in key.variables}


def test_the_version_is_the_same_everywhere() -> None:
    """In the package and in its metadata."""
    assert PROJECT["version"] == emb.__version__


def test_the_project_has_urls() -> None:
    """All of them absolute."""
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= PROJECT["urls"].keys()
    assert all(url.startswith("https://") for url in PROJECT["urls"].values())


def test_extras_install_the_expected_packages() -> None:
    """The client needs no extra; Iceberg comes without Spark; Spark comes with Iceberg."""

    def packages(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in EXTRAS[extra]:
            inner = re.fullmatch(r"embarcadero\[(\w+)\]", requirement)
            found |= packages(inner[1]) if inner else {re.split(r"[\[<>=]", requirement)[0]}
        return found

    assert packages("client") == set()
    assert packages("iceberg") == {"pyiceberg"}
    assert packages("spark") == {"pyspark", "pandas", "pyiceberg"}


def test_hints_name_extras_that_exist() -> None:
    """`pip install "embarcadero[...]"` in any message."""
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"embarcadero\[([\w-]+)\]", text)) <= EXTRAS.keys()


# --- the wheel --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy of the sources: no old build gets in."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("src", "native", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*command, str(copy)], check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_the_wheel_has_all_files_and_no_others(wheel: Path) -> None:
    """Modules, the files that Spark needs, and the license; neither tests nor the proof."""
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= names
    assert {"embarcadero/py.typed", "embarcadero/spark/log4j2.properties", "embarcadero/spark/python"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"embarcadero", "pyspark_embarcadero"}


def test_the_metadata_of_the_wheel_is_complete(wheel: Path) -> None:
    """The part that a package index shows."""
    archive = zipfile.ZipFile(wheel)
    text = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    for line in ("Project-URL: Documentation, https://", "Provides-Extra: iceberg", "Provides-Extra: client"):
        assert line in text
    assert "License-Expression: Apache-2.0" in text
    assert 'Requires-Dist: pyspark<5,>=4.0; extra == "spark"' in text


def test_the_installed_wheel_works(wheel: Path, tmp_path: Path) -> None:
    """The installed program, away from the repository."""
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(site), "EMBARCADERO_DATA_DIR": str(tmp_path / "data")}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(sys.executable, "-c", "import embarcadero; print(embarcadero.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    program = str(site / "bin" / "embarcadero")
    assert run(program, "--version") == f"embarcadero {emb.__version__}\n"
    assert "Run a private cluster" in run(program, "demo", "--help")
    assert json.loads(run(program, "config", "show", "--json"))


def test_setup_shows_progress() -> None:
    """The long step, the download of all packages, is not silent."""
    recipe = (ROOT / "Makefile").read_text().partition("$(VENV)/.ready:")[2].partition("\n\n")[0]
    assert re.findall(r"setup (\d) of 3", recipe) == ["1", "2", "3"]
    [download] = [line for line in recipe.splitlines() if "requirements.lock" in line and "pip install" in line]
    assert "--quiet" not in download


# --- the container ----------------------------------------------------------------------------------------------------
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICE: dict[str, Any] = COMPOSE["services"]["embarcadero"]


def _instructions(kind: str) -> list[str]:
    return re.findall(rf"^{kind} +(.*)$", DOCKERFILE, re.MULTILINE)


def _environment() -> dict[str, str]:
    """The environment of the container, as compose.yaml changes it."""
    found = dict(pair.split("=", 1) for line in _instructions("ENV") for pair in shlex.split(line))
    return found | {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in SERVICE["environment"].items()}


def test_the_container_needs_only_the_wheel() -> None:
    """It is built from the folder into which `make wheel` writes, and nothing else gets into the context."""
    assert "WHEELS      := build/wheel\n" in (ROOT / "Makefile").read_text()
    assert "source=build/wheel,target=/wheels" in DOCKERFILE
    assert (ROOT / ".dockerignore").read_text().split() == ["*", "!build/wheel/*.whl"]
    assert not _instructions("COPY") + _instructions("ADD")
    assert SERVICE["build"]["context"] == "."
    assert set(SERVICE["build"]["args"]) <= {line.partition("=")[0] for line in _instructions("ARG")}


def test_the_configuration_of_the_container_is_valid() -> None:
    """Every variable is one of a key, and the values fit together."""
    environment = _environment()
    assert environment.keys() <= VARIABLES
    config = resolve(environ=environment).config()
    assert config.broker.host == "0.0.0.0"
    assert config.broker.advertised_host == "localhost"
    shared = (config.cluster.brokers + 2) * config.fabric.log_bytes
    assert SERVICE["shm_size"] == "2gb"
    assert shared <= 2 * GIB * 3 // 4


def test_the_ports_of_the_container_are_those_of_the_cluster() -> None:
    """Brokers and metrics; published for this machine only, since there is no authentication."""
    config = resolve(environ=_environment()).config()
    ports = [config.broker.port + number for number in range(config.cluster.brokers)] + [config.metrics.port]
    assert _instructions("EXPOSE") == [" ".join(map(str, ports))]
    assert SERVICE["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]


def test_the_commands_of_the_container_exist() -> None:
    """The entry point, the default command, and the check of its health."""
    assert _instructions("ENTRYPOINT") == ['["embarcadero"]']
    checked = json.loads(re.findall(r"CMD (\[.*\])", _instructions("HEALTHCHECK")[0])[0])
    for arguments in (json.loads(_instructions("CMD")[0]), checked[1:]):
        command: Any = get_command(app)
        while hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        command.make_context(command.name, arguments)


def test_records_of_the_container_are_on_a_volume() -> None:
    """And it has time to make them durable before it is killed."""
    folder = _environment()["EMBARCADERO_DATA_DIR"]
    assert SERVICE["volumes"] == [f"records:{folder}"]
    assert _instructions("VOLUME") == [folder]
    assert SERVICE["stop_grace_period"] == "1m"
