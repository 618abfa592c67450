"""Analysis: the words of texts. A word is a run of Unicode letters, marks and digits, in lower case.

A language adds stop words, which are left out and leave a gap, and stems (both by tantivy, the extra `search`). It works on each distinct
word once. A text that is ASCII is cut by its bytes, any other by a regular expression; both give the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.model.errors import InvalidInput
from headwater.model.extras import missing_extra

LANGUAGES = (
    "arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian", "norwegian",
    "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish",
)  # fmt: skip
WITHOUT_STOP_WORDS = {"arabic", "greek", "romanian", "tamil", "turkish"}
STEMS_KEPT_MAX = 1_000_000

_BETWEEN = r"[^\p{L}\p{M}\p{N}]+"
_ASCII_WORD = re.compile("[a-z0-9]+")
_Array = Any
"""A NumPy array."""


class TextWords(NamedTuple):
    """The words of a column: of each its row, its place in the row's text, and its number in a dictionary."""

    row: _Array
    place: _Array
    number: _Array


class Analyzer:
    """How words become terms. It is pickled into tasks."""

    def __init__(self, language: str | None = None) -> None:
        if language is not None and language not in LANGUAGES:
            raise InvalidInput(
                f"Stems for the language {language!r:.40} are not available.",
                advice=f"Languages are {', '.join(LANGUAGES)}. Leave language= out to match words as they are written.",
            )
        self.language = language
        if language is not None:
            _stemmer(language)

    def terms(self, text: str) -> list[tuple[str, int]]:
        """The terms of a text, each with the place of its word."""
        found = ((self.term(word), place) for place, word in enumerate(words_of(text)))
        return [(term, place) for term, place in found if term is not None]

    def term(self, word: str) -> str | None:
        """What a word is searched as; None for a stop word."""
        return word if self.language is None else _stem(self.language, word)

    def terms_of(self, words: pa.StringArray) -> pa.StringArray:
        """The same for many words; null for stop words."""
        if self.language is None:
            return words
        return pa.array([_stem(self.language, word) for word in words.to_pylist()], pa.string())


def words_of(text: str) -> list[str]:
    """The words of one text, in their order."""
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    (found,) = pc.split_pattern_regex(pc.utf8_lower(pa.array([text], pa.string())), _BETWEEN).to_pylist()
    return [word for word in found if word]


def columns_words(columns: Sequence[pa.Array]) -> tuple[list[TextWords], pa.StringArray]:
    """The words of some columns of text, and the dictionary that they share: each distinct word once."""
    cuts = [_cut(column) for column in columns]
    counts = [len(words) for words, _, _ in cuts]
    encoded = pa.concat_arrays([words for words, _, _ in cuts]).dictionary_encode() if cuts else _no_words()
    numbers = np.split(encoded.indices.to_numpy(zero_copy_only=False), np.cumsum(counts))[:-1]
    found = [TextWords(row, place, number) for (_, row, place), number in zip(cuts, numbers, strict=True)]
    return found, encoded.dictionary


def _no_words() -> Any:
    return pa.array([], pa.string()).dictionary_encode()


def _cut(column: pa.Array) -> tuple[pa.StringArray, _Array, _Array]:
    """The words of a column with their rows and places."""
    column = column.cast(pa.string()).fill_null("")
    is_ascii = pc.string_is_ascii(column).to_numpy(zero_copy_only=False)
    if bool(is_ascii.all()):
        words, row = _cut_ascii(column)
    else:
        plain, other = np.flatnonzero(is_ascii), np.flatnonzero(~is_ascii)
        words, row = _cut_ascii(column.take(pa.array(plain)))
        more, more_row = _cut_unicode(column.take(pa.array(other)))
        row = np.concatenate([plain[row], other[more_row]])
        order = np.argsort(row, kind="stable")
        words, row = pa.concat_arrays([words, more]).take(pa.array(order)), row[order]
    first = np.searchsorted(row, np.arange(len(column)))
    return words, row, np.arange(len(row)) - first[row]


def _cut_ascii(column: pa.StringArray) -> tuple[pa.StringArray, _Array]:
    """A word begins and ends where bytes of words and others meet, or a row ends."""
    if not len(column):
        return pa.array([], pa.string()), np.zeros(0, np.int64)
    column = pc.ascii_lower(column)
    _, offsets_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offsets_buffer, np.int32, len(column) + 1, column.offset * 4)
    data = np.frombuffer(data_buffer or b"", np.uint8)[: offsets[-1]]
    is_word = _word_bytes()[data]
    is_cut = np.zeros(len(data) + 1, bool)
    np.not_equal(is_word[1:], is_word[:-1], out=is_cut[1 : len(data)])
    is_cut[offsets] = True
    is_cut[-1] = True
    cuts = np.flatnonzero(is_cut)
    runs = pa.StringArray.from_buffers(len(cuts) - 1, pa.py_buffer(cuts.astype(np.int32)), data_buffer)
    is_run = is_word[cuts[:-1]] & (cuts[:-1] >= offsets[0])
    row = np.repeat(np.arange(len(column)), np.diff(np.searchsorted(cuts[:-1][is_run], offsets)))
    return runs.filter(pa.array(is_run)), row


def _cut_unicode(column: pa.StringArray) -> tuple[pa.StringArray, _Array]:
    found = pc.split_pattern_regex(pc.utf8_lower(column), _BETWEEN)
    words = found.flatten()
    is_word = np.asarray(pc.greater(pc.binary_length(words), 0))
    return words.filter(pa.array(is_word)), np.asarray(pc.list_parent_indices(found))[is_word]


@lru_cache(1)
def _word_bytes() -> _Array:
    """Which bytes of ASCII in lower case are of words."""
    found = np.zeros(256, bool)
    found[[*range(ord("0"), ord("9") + 1), *range(ord("a"), ord("z") + 1)]] = True
    return found


@lru_cache(len(LANGUAGES))
def _stemmer(language: str) -> Any:
    try:
        import tantivy
    except ModuleNotFoundError as error:
        raise missing_extra(error, purpose=f"The language {language!r} of searches") or error from error
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.raw())
    if language not in WITHOUT_STOP_WORDS:
        builder = builder.filter(tantivy.Filter.stopword(language))
    return builder.filter(tantivy.Filter.stemmer(language)).build()


@lru_cache(STEMS_KEPT_MAX)
def _stem(language: str, word: str) -> str | None:
    found = _stemmer(language).analyze(word)
    return str(found[0]) if found else None
