"""The log of our HTTP servers: what fails here is told with its traceback, what who asks does wrong is told to him alone.

A stranger's broken request or lost connection is no event of a run: it neither fills a disk nor hides what matters.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

WRONGLY_ASKED = (HttpProcessingError, ConnectionError, web.RequestPayloadError)
"""Errors that say that a request did not arrive whole, or its answer not at all."""


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], WRONGLY_ASKED))


HTTP_LOG = logging.getLogger("rondo.http")
HTTP_LOG.addFilter(_is_ours)
