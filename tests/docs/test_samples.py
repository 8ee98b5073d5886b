"""Working documentation: every sample runs and prints the expected output."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from examples.rest_catalog import RestCatalog

import embarcadero as emb
from embarcadero.limits import MIB
from embarcadero.node.folder import ClusterFolder
from embarcadero.node.local import LocalCluster
from embarcadero.node.report import report
from tests.docs.samples import PAGES, ROOT, RUN, Block, Runner, blocks, commands, environment, looks_like
from tests.docs.warm import Warm


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """For all pages that do not start one themselves."""
    with LocalCluster(brokers=2, log_bytes=32 * MIB) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """The command line, loaded once for all pages."""
    warm = Warm(environment(tmp_path_factory.mktemp("nowhere")))
    yield warm
    warm.close()


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[str]:
    """The address of a REST catalog, for the page that has one."""
    with RestCatalog(tmp_path / "catalog") as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.uri
        server.shutdown()


SPARK = ROOT / "docs" / "spark.md"
PIPELINE = ROOT / "docs" / "pipeline.md"
"""Pages with Spark take long, and have files of tests of their own (test_spark_page.py, test_pipeline_page.py)."""
LAKEHOUSE = ROOT / "docs" / "lakehouse.md"
"""It needs jars of Iceberg and another PySpark, and is run by `make matrix` (tests/matrix/test_lakehouse.py)."""
APART = (SPARK, PIPELINE, LAKEHOUSE)
WITH_SAMPLES = [page for page in PAGES if page not in APART and any(block.language in RUN for block in blocks(page))]


@pytest.fixture(params=WITH_SAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def page(request: pytest.FixtureRequest) -> Path:
    """Every page with samples."""
    found: Path = request.param
    return found


@pytest.fixture
def runner(
    page: Path, warm: Warm, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runner]:
    """Where the samples of a page run: on the shared cluster without topics, or by themselves if they call `up`."""
    own = any("embarcadero up" in block.text for block in blocks(page) if block.language == "console")
    data_dir = tmp_path / "cluster" if own else request.getfixturevalue("cluster").data_dir
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    variables = environment(data_dir)
    for name in variables:
        monkeypatch.setenv(name, variables[name])
    spark_before = _spark()
    addresses = lambda: ",".join(report(ClusterFolder(data_dir)).addresses)  # noqa: E731 - a name for one line
    runner = Runner(tmp_path, variables, addresses, warm, lambda: request.getfixturevalue("catalog"))
    if not own:
        _delete_topics(runner.address())
    yield runner
    for left in [value for value in runner.namespace.values() if isinstance(value, emb.Log)]:
        with suppress(emb.EmbarcaderoError):  # a page may show how a publisher fails
            left.close()
    if spark_before is None and (left_running := _spark()) is not None:
        left_running.stop()
    if own and ClusterFolder(data_dir).running_pid() is not None:
        runner.run([Block(page, 0, "console", "$ embarcadero down\n")])


def _spark() -> Any:
    """The Spark session of this process, if there is one: a page may begin one, and tests with Spark share theirs."""
    sql = sys.modules.get("pyspark.sql")
    return None if sql is None else sql.SparkSession.getActiveSession()


def _delete_topics(address: str) -> None:
    with emb.connect(address) as log:
        for topic in log.topics():
            log.delete_topic(topic.name)


def test_samples_run_and_print_the_expected_output(runner: Runner, page: Path) -> None:
    """Each page by itself, from top to bottom, as a reader would do it."""
    samples = blocks(page)
    runner.run(samples)

    assert runner.ran == sum(block.language in RUN for block in samples)


# --- the runner itself ------------------------------------------------------------------------------------------------
def _page(folder: Path, text: str) -> list[Block]:
    (folder / "page.md").write_text(text)
    return blocks(folder / "page.md")


@pytest.fixture
def bare(tmp_path: Path) -> Runner:
    """A runner without a cluster."""
    return Runner(tmp_path, environment(tmp_path), lambda: "127.0.0.1:1")


@pytest.mark.parametrize(
    "wrong",
    [
        "```python\nprint(1)\n```\n```text\n2\n```",
        "```python\n1 / 0\n```",
        "```python\nassert '127.0.0.1:9092' == 'the address of the page'\n```",
        "```console\n$ echo one\ntwo\n```",
        "```console\n$ false\n```",
        "```console\n$ echo error: no\nerror: no\n```",
        "```console\necho one\n```",
        "```console\n$ echo one; sleep 60\ntwo\n^C\n```",
        "```yaml\nno: name\n```",
        "```ruby\nputs 1\n```",
        "```python\nprint(1)",
    ],
)
def test_a_wrong_sample_is_noticed(bare: Runner, tmp_path: Path, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong output, a wrong end, a block that would never run."""
    monkeypatch.setattr("tests.docs.samples.SHOWN_S", 0.5)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        bare.run(_page(tmp_path, wrong))


def test_the_blocks_of_a_page_belong_together(bare: Runner, tmp_path: Path) -> None:
    """One namespace, one folder; files are written; endless commands are interrupted; pictures are ignored."""
    text = (
        "```\n--> a picture\n```\n```yaml\n# a.yaml\nx: 1\n```\n```python\nx = '127.0.0.1:9092'\n```\n"
        "```python\n# b.py\nprint(2)\n```\n```python\nprint(x)\n```\n```text\n127...:1\n```\n"
        "```console\n$ cat a.yaml\n# a.yaml\n...\n$ python b.py\n2\n$ echo one && sleep 60\none\n^C\n"
        "$ echo error: no >&2; false\nerror: no\n```\n"
    )
    bare.run(_page(tmp_path, text))

    assert bare.ran == 5
    assert len(commands(blocks(tmp_path / "page.md")[-1])) == 4


def test_output_is_compared_loosely() -> None:
    """White space and `...` are; words are not."""
    assert looks_like("a   b\nc", "a b\n   c\n")
    assert looks_like("a ... c", "a 1\n2 c")
    assert looks_like("...", "")
    assert looks_like("a...", "a", begins=True)
    assert looks_like("a", "a\nmore", begins=True)
    assert not looks_like("a", "a b")
    assert not looks_like("a ... c", "a b")
