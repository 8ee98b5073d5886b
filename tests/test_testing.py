"""The pytest fixtures that users get, in a pytest of their own."""

from __future__ import annotations

import re
import textwrap

import pytest

from embarcadero import testing

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.system

MORE = """
    import asyncio
    import embarcadero as emb

    def test_topics_are_fresh(embarcadero_log, embarcadero_topic):
        names = [topic.name for topic in embarcadero_log.topics()]
        assert names == [embarcadero_topic]
        assert embarcadero_log.tail(embarcadero_topic).seq == 0
        embarcadero_log.delete_topic(embarcadero_topic)

    def test_asyncio(embarcadero_address, embarcadero_topic):
        async def body():
            async with await emb.aio.connect(embarcadero_address) as log:
                assert (await log.describe(embarcadero_topic)).name == embarcadero_topic
        asyncio.run(body())

    @pytest.mark.parametrize("text", ["a/b c", "\u00fc"])
    def test_names_that_are_no_topic_names(embarcadero_topic, text):
        assert embarcadero_topic.isascii()

    def test_options(embarcadero_cluster):
        assert len(embarcadero_cluster.addresses) == 1
"""


def test_the_example_of_the_documentation_runs(pytester: pytest.Pytester) -> None:
    """The code of the module's documentation, and its other promises, under strict markers and warnings as errors."""
    blocks = [
        textwrap.dedent(block) for block in re.findall(r"\n\n((?: {4}[^\n]*\n|\n(?= {4}))+)", testing.__doc__ or "")
    ]
    plugins, tests, options = blocks
    pytester.makeconftest(plugins + "import pytest\n" + options.replace('"brokers": 4', '"brokers": 1'))
    pytester.makepyfile(tests + textwrap.dedent(MORE))
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\naddopts = "--strict-markers"\nfilterwarnings = ["error"]\n')
    ran = pytester.runpytest_subprocess("-q", timeout=120)
    ran.assert_outcomes(passed=7)
