"""Put events: a record that became visible, as the coordinator folds it, and as a line of the journal has it.

Owns both forms and the way between them. Does not own what a record says (`ring/records.py`) or what a put means (`index.py`).

    put_event(ref, descriptor)   -> {"event": "put", "ring": ..., "pos": 0, ..., "spans": [[7, 0, 0, 2]], "record": bytes}
    short(event)                 -> {"event": "put", "ring": ..., "record": "UlJFQwM..."}      the record's own bytes, in base64
    whole(that)                  -> the first

Invariant: a put is made into bytes once, by its producer: header and descriptor are journalled as they lie in the ring.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from typing import Any

import orjson

from rondo.comm.ring.records import Descriptor, header_of, read_descriptor
from rondo.comm.ring.ring import RecordRef
from rondo.comm.ring.spans import num_samples


def put_event(ref: RecordRef, descriptor: Descriptor) -> dict[str, Any]:
    """The event of a record with samples, media or derived columns of prompt groups."""
    spans, make = descriptor.spans, descriptor.make
    said = len(make.kinds) > make.num_lengths
    event = {
        "event": "put", "ring": ref.ring, "pos": ref.pos, "seq": ref.seq, "bytes": ref.num_bytes, "spans": spans,
        "columns": [*make.names], "epoch": descriptor.epoch, "attempt": descriptor.attempt,
        "reservation": descriptor.meta["reservation"],
        # Room is promised by the sample, and for the columns of a round as one record.
        "entries": num_samples(spans) if said else 1, "record": descriptor.raw,
    }  # fmt: skip
    if said:
        event["info"] = descriptor.info()
    return event


def short(event: dict[str, Any]) -> dict[str, Any]:
    """What is written of a put."""
    record = orjson.Fragment(b'"%s"' % b2a_base64(event["record"], newline=False))
    return {"event": "put", "ring": event["ring"], "record": record}


def whole(event: dict[str, Any]) -> dict[str, Any]:
    """A put that was written so."""
    raw = a2b_base64(event["record"])
    header = header_of(raw)
    return put_event(RecordRef(event["ring"], header.pos, header.seq, header.num_bytes), read_descriptor(header, raw))
