"""Token files: read and judged. Apart from `admin.py` so that `rondo check` need not import a server."""

from __future__ import annotations

from pathlib import Path

from rondo.runtime.errors import ConfigError

MIN_CHARACTERS = 16


def read_token_file(path: Path, setting: str = "admin.token_file") -> str:
    """The token in a file that only its owner can read. ConfigError, which names the setting, otherwise."""
    try:
        mode = path.stat().st_mode & 0o777
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{setting} must be readable, got {path} ({error.strerror}). Check the path") from error
    if mode & 0o077:
        raise ConfigError(f"{setting} must have mode 0600, got {mode:04o}. Run: chmod 600 {path}")
    if len(token) < MIN_CHARACTERS:
        raise ConfigError(
            f"{setting} must hold at least {MIN_CHARACTERS} characters, got {len(token)}. "
            f"Run: openssl rand -hex 32 > {path}"
        )
    return token
