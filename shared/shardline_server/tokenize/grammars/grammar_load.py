"""The vocabulary of a model as grammars need it, read while its weights are: Python stands still
meanwhile, for up to a second, and no step should wait for that.

Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from shardline.base.errors import Invalid
from shardline_server.tokenize.folder import tokenizer_json
from shardline_server.tokenize.grammars.grammar import GrammarError, Grammars


class GrammarLoad:
    """Reads one vocabulary in a separate thread, which starts at once."""

    def __init__(self, folder: Path, *, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._grammars: Grammars | None = None
        self._error = ""
        self._thread = Thread(target=self._read, name="grammar vocabulary", daemon=True)
        self._thread.start()

    def result(self) -> Grammars:
        """Waits for the end. Raises GrammarError for a vocabulary that no grammar can be matched
        with."""
        self._thread.join()
        if self._grammars is None:
            raise GrammarError(self._error)
        return self._grammars

    def _read(self) -> None:
        try:
            self._grammars = Grammars(
                tokenizer_json(self._folder, vocab_size=self._vocab_size),
                vocab_size=self._vocab_size,
                eos_ids=self._eos_ids,
            )
        except (GrammarError, Invalid, OSError) as error:  # it concerns these jobs alone
            self._error = str(error)
