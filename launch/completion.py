"""Shell completion: verbs, options, and the paths and values of settings behind `--set`.

    eval "$(rondo completion bash)"      in .bashrc; zsh and fish in the same way

Owns what argcomplete cannot know. Does not own how a shell asks: argcomplete's script runs this command with a half-written line.
Loads no torch: settings are read from their classes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from rondo.runtime.errors import ConfigError

INSTALL = "pip install 'rondo-rl[completion]'"


def script(shell: str) -> int:
    """Prints what the shell is to run at its start."""
    try:
        from argcomplete import shellcode
    except ImportError as error:
        raise ConfigError(f"the package argcomplete must be installed to complete lines. Run: {INSTALL}") from error
    print(shellcode(["rondo"], shell=shell))
    return 0


def complete(parser: argparse.ArgumentParser, verbs: dict[str, argparse.ArgumentParser]) -> None:
    """Answers the shell, and ends this process."""
    import argcomplete

    for made in verbs.values():
        for action in made._actions:
            if action.dest in ("sets", "config"):
                completer = argcomplete.FilesCompleter(("py",)) if action.dest == "config" else _settings
                action.completer = completer  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _settings(prefix: str, **_: Any) -> list[str]:
    from rondo.launch.config import RunConfig

    return [text for text in paths(RunConfig) if text.startswith(prefix) and text != prefix]


def paths(section: Any, above: str = "") -> Iterator[str]:
    """ "train.lr=" of every setting below; with each value of those that have a few: "train.schedule=linear"."""
    from rondo.runtime.section import field_section, parts_of

    for name, field in section.model_fields.items():
        path = f"{above}{name}"
        below = field_section(section, name)
        kinds = parts_of(field.annotation)
        origins = [get_origin(kind) for kind in kinds]
        if below is not None and dict not in origins:
            yield from paths(below, f"{path}.0." if tuple in origins else f"{path}.")
            continue
        yield f"{path}="
        values = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        yield from (f"{path}={value}" for value in (values or (["True", "False"] if bool in kinds else [])))
