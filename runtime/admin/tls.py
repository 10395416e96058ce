"""TLS: certificate files, read and judged, and contexts of both sides.

Owns what a server shows and what a command of ours trusts: the very certificate that the run's settings name, and no name, since
it asks its own machine by an address. Does not own the files.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from rondo.runtime.admin.tokens import require_private
from rondo.runtime.errors import ConfigError


def server_context(
    cert: Path | None, key: Path | None, settings: tuple[str, str] = ("admin.tls_cert", "admin.tls_key")
) -> ssl.SSLContext | None:
    """Of a server with that certificate, those that lead to its root behind it, and its key; None without them. ConfigError,
    which names the settings, where they are none, or others may read the key."""
    if cert is None or key is None:
        if cert is not key:
            raise ConfigError(
                f"{' and '.join(settings)} must be set together, got {cert} and {key}. Set both, or neither"
            )
        return None
    require_private(key, settings[1])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key, password="")  # else a key with a password would ask for it on the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        why = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{' and '.join(settings)} must be a certificate and its key without a password, both PEM, "
            f"got {cert} and {key} ({why}). Check the files"
        ) from None
    return context


def client_context(cert: Path) -> ssl.SSLContext:
    """Of a command that asks the server of that certificate, and no other. OSError where it cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= (
        ssl.VERIFY_X509_PARTIAL_CHAIN
    )  # the first certificate of the file is trusted, whoever signed it
    context.load_verify_locations(cert)
    return context
