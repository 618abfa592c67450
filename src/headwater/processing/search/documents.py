"""Documents: a batch of them as searches look at it: the words of each field, and values as numbers.

Fields have codes: their places among `SearchFields.kinds`. A text that searches name as a whole (a name) has one word, which is itself.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headwater.model.errors import InvalidInput
from headwater.processing.expressions.expression import Expression, compile_condition
from headwater.processing.search.analysis import Analyzer, columns_words
from headwater.processing.search.fields import SearchFields, numbers_of

CONDITIONS_KEPT = 65_536
_Array = Any
"""A NumPy array."""


class FieldWords(NamedTuple):
    """The words of a field, by document and place; each with its number among all distinct words of the batch."""

    code: int
    is_text: bool
    row: _Array
    place: _Array
    number: _Array


class Documents:
    """A batch of documents."""

    def __init__(self, rows: pa.Table, fields: SearchFields, analyzer: Analyzer) -> None:
        self._rows, self._fields, self._analyzer = rows, fields, analyzer
        self._numbers: dict[int, _Array] = {}
        self._held: dict[str, _Array] = {}
        self._names = list(fields.kinds)
        self.words, self.written, self.terms = self._words()

    def __len__(self) -> int:
        return self._rows.num_rows

    def numbers(self, code: int) -> _Array:
        """The values of a field as numbers in their order; behind the codes of fields, how many words or values it has."""
        if code not in self._numbers:
            self._numbers[code] = (
                self._counts(code - len(self._names)) if code >= len(self._names) else self._values(code)
            )
        return self._numbers[code]

    def place(self, code: int) -> tuple[_Array, _Array]:
        """The latitude and longitude of a place; NaN where there is none on the earth."""
        latitude, longitude = (self._degrees(name) for name in self._fields.places[self._names[code]])
        is_there = (np.abs(latitude) <= 90) & (np.abs(longitude) <= 180)
        return np.where(is_there, latitude, np.nan), np.where(is_there, longitude, np.nan)

    def holds(self, sql: str) -> _Array:
        """Whether a condition over the columns holds of each document. Null is no, and so is a value that it fails for."""
        if sql not in self._held:
            self._held[sql] = self._mask(_condition(sql, self._rows.schema), 0, len(self))
        return self._held[sql]

    def _mask(self, condition: Expression, start: int, end: int) -> _Array:
        """The documents from start to end of which a condition holds; one that it fails for is found by halving."""
        columns = {name: self._column(name).slice(start, end - start) for name in condition.columns}
        try:
            return condition.mask(columns, end - start)
        except InvalidInput:
            if end - start == 1:
                return np.zeros(1, bool)
            middle = (start + end) // 2
            return np.concatenate([self._mask(condition, start, middle), self._mask(condition, middle, end)])

    def _words(self) -> tuple[list[FieldWords], pa.StringArray, pa.StringArray]:
        kinds = self._fields.kinds
        texts = [name for name in self._names if kinds[name] == "text"]
        found, written = columns_words([self._column(name) for name in texts])
        words = [FieldWords(self._names.index(name), True, *each) for name, each in zip(texts, found, strict=True)]
        terms, wholes = self._analyzer.terms_of(written), []
        if terms.null_count:
            is_term = np.asarray(terms.is_valid())
            words = [_only(each, is_term[each.number]) for each in words]
        start = len(written)
        for name in self._names:
            if kinds[name] == "name":
                encoded = self._column(name).dictionary_encode()
                row = np.flatnonzero(np.asarray(encoded.is_valid()))
                number = np.asarray(encoded.indices.drop_null()).astype(np.int64) + start
                words.append(FieldWords(self._names.index(name), False, row, np.zeros(len(row), np.int64), number))
                wholes.append(encoded.dictionary)
                start += len(encoded.dictionary)
        return words, pa.concat_arrays([written, *wholes]), pa.concat_arrays([terms, *wholes])

    def _values(self, code: int) -> _Array:
        return numbers_of(self._column(self._names[code]))

    def _counts(self, code: int) -> _Array:
        name = self._names[code]
        if self._fields.kinds[name] == "text":
            (words,) = (each for each in self.words if each.code == code)
            return np.bincount(words.row, minlength=len(self))
        if self._fields.kinds[name] == "place":
            return np.isfinite(self.place(code)[0]).astype(np.int64)
        return np.asarray(self._column(name).is_valid()).astype(np.int64)

    def _degrees(self, name: str) -> _Array:
        return np.asarray(self._column(name).cast(pa.float64()).fill_null(np.nan))

    def _column(self, name: str) -> pa.Array:
        found = self._rows.column(name)
        return (
            found.chunk(0)
            if found.num_chunks == 1
            else pa.concat_arrays(found.chunks)
            if found.num_chunks
            else pa.array([], found.type)
        )


def _only(words: FieldWords, mask: _Array) -> FieldWords:
    return words._replace(row=words.row[mask], place=words.place[mask], number=words.number[mask])


@lru_cache(CONDITIONS_KEPT)
def _condition(sql: str, schema: pa.Schema) -> Expression:
    """A condition that was compiled before, when its search was read."""
    return compile_condition(sql, schema)
