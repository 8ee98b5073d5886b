"""Tables on the command line: nothing is cut, and pipes get plain lines."""

from __future__ import annotations

import sys

import pytest

from embarcadero.cli.output import print_table

COLUMNS = ["role", "incarnation", "address", "pid", "state", "metrics"]
ROWS = [
    ["broker 0", 1, "127.0.0.1:9092", 31_337, "live", "127.0.0.1:40000"],
    ["replica 0", 1, "2 open, 117 sealed ranges, lag 0", 31_338, "disk full: free some room", ""],
]
BOX = set("│┃┏┓└┘├┤─━┡")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)


def words(text: str) -> str:
    """The text without white space and boxes."""
    return "".join(letter for letter in text if not letter.isspace() and letter not in BOX)


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each row, as wide as it needs to be, in columns; no boxes."""
    monkeypatch.setenv("COLUMNS", "40")
    print_table("cluster x", COLUMNS, ROWS)
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert title == "cluster x"
    assert header.split() == COLUMNS
    assert lines[0].split("  ")[0] == "broker 0"
    assert [line.index("127.0.0.1:9092" if "9092" in line else "2 open") for line in lines] == [
        header.index("address"),
        header.index("address"),
    ]
    assert lines[1].endswith("disk full: free some room  -")
    assert not BOX & set("".join(lines))


def test_a_cell_of_several_lines_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """One row is one line, whatever is in it."""
    print_table("", ["a", "b"], [["one\ntwo", 3]])
    assert capsys.readouterr().out == "a        b\none two  3\n"


def test_a_table_without_rows_has_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """The title and the header."""
    print_table("topics", ["name", "order"], [])
    assert capsys.readouterr().out == "topics\nname  order\n"


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_a_terminal_shows_every_cell_whole(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells wrap; a table that is still too wide becomes a block for each row."""
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table("cluster x", COLUMNS, ROWS)
    shown = capsys.readouterr().out
    assert "…" not in shown
    for row in ROWS:
        for cell in row:
            if columns in (30, 200):
                assert str(cell) in shown
            assert set(str(cell).split()) <= set(shown.replace("│", " ").split()) or columns > 30
    if columns == 30:
        assert not BOX & set(shown)


@pytest.mark.usefixtures("terminal")
def test_a_long_word_wraps(capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is longer than the terminal is shown to its end."""
    path = "/var/lib/embarcadero/" + "x" * 200
    print_table("", ["file"], [[path]])
    assert path in words(capsys.readouterr().out)


@pytest.mark.usefixtures("terminal")
def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """`[spark]` stays as it is."""
    print_table("title [spark]", ["hint"], [['pip install "embarcadero[spark]"']])
    assert capsys.readouterr().out.count("[spark]") == 2
