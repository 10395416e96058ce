"""What goes wrong with media.

Owns the error for one bad medium or prompt, and the one for a missing extra. A `MediaError` concerns one row: whoever prepares
rows counts it against that row and goes on. Imports nothing heavy.

    MediaError("image cats/7.png must be an image that can be read, got a truncated file. Correct or remove the row")
"""

from __future__ import annotations

from rondo.runtime.errors import ConfigError, RondoError


class MediaError(RondoError, ValueError):
    """A medium, or a prompt with its media, breaks a rule. The text names the medium, the rule and the value."""


def reason(error: BaseException) -> str:
    """What an error of a library says, in one line."""
    if type(error).__name__ == "UnidentifiedImageError":  # its text is an address in memory
        return "no image format that is read"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


def missing_extra(package: str) -> ConfigError:
    """The error for a machine without `package`."""
    return ConfigError(
        f"{package} must be installed to read media, got no such package. Run: pip install 'rondo-rl[media]'"
    )
