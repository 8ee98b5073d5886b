"""The configuration of a command: --config FILE (or the usual places) < environment < options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from embarcadero.config import Config
    from embarcadero.config.resolve import Resolved

Verb = TypeVar("Verb", bound=Callable[..., Any])
Flags = Mapping[str, tuple[str, Any]]
"""Options by the full key they set: the option's name, and its value or None."""

_file: ContextVar[Path | None] = ContextVar("file", default=None)
_HELP = "Configuration. Default: $EMBARCADERO_CONFIG, ./embarcadero.yaml, ~/.config/embarcadero/embarcadero.yaml."
_OPTION = Annotated[Path | None, typer.Option("--config", show_default=False, metavar="FILE", help=_HELP)]


class Verbs(typer.Typer):
    """Commands; those that work with a cluster get --config as well."""

    def command(self, *arguments: Any, **options: Any) -> Callable[[Verb], Verb]:
        """Register a command, as typer does."""
        register = super().command(*arguments, **options)

        def decorate(function: Verb) -> Verb:
            register(with_config(function))
            return function

        return decorate


def with_config(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an option --config before --json, if it works with a cluster (--data-dir)."""
    signature = inspect.signature(function, eval_str=True)
    parameters = dict(signature.parameters)
    if "data_dir" not in parameters:
        return function

    @functools.wraps(function)
    def run(*arguments: Any, config: Path | None = None, **options: Any) -> Any:
        token = _file.set(config)
        try:
            return function(*arguments, **options)
        finally:
            _file.reset(token)

    last = [parameters.pop("json")] if "json" in parameters else []
    added = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_OPTION)
    every = [*parameters.values(), added, *last]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in every]
    run.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return run


def resolved(flags: Flags | None = None, *, file: Path | None = None, base: Config | None = None) -> Resolved:
    """What all sources say, with the problems they have."""
    from embarcadero.config.resolve import as_given, resolve, which_file
    from embarcadero.config.table import DEFAULTS

    given = {key: as_given(key, value, name) for key, (name, value) in (flags or {}).items() if value is not None}
    return resolve(which_file(file or _file.get(), search=True), given, base=base or DEFAULTS)


def settings(flags: Flags | None = None, *, base: Config | None = None) -> Config:
    """The configuration of this command; raises BadConfiguration, with all problems."""
    return resolved(flags, base=base).config()
