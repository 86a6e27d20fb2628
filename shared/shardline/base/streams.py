"""Standard output and error of command lines. Knows no text."""

from __future__ import annotations

import codecs
import io
import json
import sys

HANDLER = "shardline.escape"


def escape_unencodable() -> None:
    """Makes stdout and stderr escape what their encoding lacks, as in JSON (`\\u00e9`): a document
    stays valid, and no text ends a command. Another handler that is set stays."""
    codecs.register_error(HANDLER, _escape)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors=HANDLER)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
