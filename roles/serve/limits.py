"""Limits: how much one request may bring and ask for, in one place, and what is refused before any work begins on it.

Owns the counts and sizes that depend on no model. The numbers that samples are drawn by have their ranges in `ranges.py`; how
many characters and tokens a prompt may have follows from the model that is served (`service.py`).
"""

from __future__ import annotations

MAX_NAME = 256
"""Characters of a name that a caller gives: of a session, of a request."""
MAX_SAMPLES = 256
"""Samples that one request may ask for, over all of its prompts."""
MAX_TOPS = 1 << 21
"""Log-probs of tokens that were not drawn, over all samples: `top_logprobs` of each of `max_tokens`."""
MAX_MESSAGES = 8192
MAX_PARTS = 4096
"""Of the content of one message."""
MAX_TOOLS = 1024
"""That a request names, or that one message calls."""
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Of all stop strings of a request together."""
MIN_BODY_BYTES = 4 << 20
BODY_BYTES_A_TOKEN = 32
"""The body of a request has this many bytes for every token that fits into the model, and at least `MIN_BODY_BYTES`."""
LONG_BODY_BYTES = 256 << 10
MAX_LONG_BODIES = 4
"""So many longer ones are read, and made into tokens, at a time: they grow twentyfold on the way."""
BODY_S = 60.0
"""A body that has not come whole by then is not waited for."""
