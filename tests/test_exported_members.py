"""The public names: all there, sorted, and light to import."""

from __future__ import annotations

import subprocess
import sys

import embarcadero as emb
from embarcadero import errors


def test_every_public_name_can_be_imported() -> None:
    """Every name in `__all__` exists, also those that load late; others are an AttributeError."""
    for name in emb.__all__:
        assert getattr(emb, name) is not None
    assert not hasattr(emb, "nonsense")


def test_public_names_are_sorted_and_unique() -> None:
    """Constants, then classes, then functions and modules, each by name."""
    kinds = [(name.lower() == name, name.upper() != name, name) for name in emb.__all__]

    assert kinds == sorted(kinds)
    assert len(set(emb.__all__)) == len(emb.__all__)
    assert dir(emb) == sorted(emb.__all__)


def test_the_clients_are_twins() -> None:
    """Every call of one client exists in the other, under the same name, except calls that only threads need."""
    for name in ("Log", "Publisher", "Subscriber"):
        one, other = getattr(emb, name), getattr(emb.aio, name)
        public = {n for n in dir(one) if not n.startswith("_")} - {"ended", "run", "twin"}
        assert public == {n for n in dir(other) if not n.startswith("_")}
    assert {"connect", "local"} <= set(emb.aio.__all__) & set(emb.__all__)


def test_importing_the_package_loads_nothing_heavy() -> None:
    """`import embarcadero` is quick: no arrow, no event loop, before a client is used."""
    code = "import sys, embarcadero; print(sorted({'pyarrow', 'uvloop', 'numpy'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert shown.stdout.strip() == "[]"


def test_errors_survive_the_wire_and_pickling() -> None:
    """Each error is restored from its name with its message and hint."""
    import pickle

    for name, kind in errors.BY_NAME.items():
        error = errors.from_wire(name, "problem", "do this")
        again = pickle.loads(pickle.dumps(error))
        assert type(error) is type(again) is kind
        assert (again.message, again.hint) == ("problem", "do this")
