"""Functions of texts, which are sequences of Unicode characters, and LIKE."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.processing.expressions.operands import Function, Operands
from headwater.processing.expressions.term import Term, Values, array_of, arrayed, constant, mapped, numbers, truths
from headwater.processing.expressions.type_rules import BINARY, BOOLEAN, INT, STRING

ANY, ONE = ("%", ""), ("_", "")
"""What `%` and `_` are in a pattern of LIKE; another part is a text that has to be there."""

Part = tuple[str, str]


def like(operands: Operands, value: Term, pattern: Term, escape: str, *, folds: bool = False) -> Term:
    """`value LIKE pattern ESCAPE escape`, of the whole text; with `folds` it is ILIKE."""
    if pattern.value is None:
        raise operands.unsupported("LIKE with a pattern that is not a constant")
    term, wanted = operands.text(value, "LIKE"), operands.text(pattern, "LIKE").value
    assert wanted is not None
    if not wanted.is_valid:
        return constant(None, BOOLEAN)
    if folds:
        term = mapped(STRING, [term], _lower)
    parts = _parts(operands, str(wanted.as_py()).lower() if folds else str(wanted.as_py()), escape)
    text = "".join(literal for _, literal in parts)
    match [name for name, _ in parts]:
        case [] | [""]:
            return mapped(BOOLEAN, [term], lambda values: pc.equal(values, text))
        case ["", "%"]:
            return mapped(BOOLEAN, [term], lambda values: pc.starts_with(values, text))
        case ["%", ""]:
            return mapped(BOOLEAN, [term], lambda values: pc.ends_with(values, text))
        case ["%", "", "%"]:
            return mapped(BOOLEAN, [term], lambda values: pc.match_substring(values, text))
    shape = {"%": ".*", "_": "."}
    regex = r"(?s)\A" + "".join(shape.get(name) or re.escape(literal) for name, literal in parts) + r"\z"
    return mapped(BOOLEAN, [term], lambda values: pc.match_substring_regex(values, regex))


def _parts(operands: Operands, pattern: str, escape: str) -> list[Part]:
    parts: list[Part] = []
    characters = iter(pattern)
    for character in characters:
        part = {"%": ANY, "_": ONE}.get(character, ("", character))
        if character == escape:
            following = next(characters, "")
            if following not in (escape, "%", "_") or not following:
                raise operands.wrong(f"LIKE {pattern!r} has {escape!r} before {following!r}, which it cannot escape")
            part = ("", following)
        if parts and not part[0] and not parts[-1][0]:
            parts[-1] = ("", parts[-1][1] + part[1])
        else:
            parts.append(part)
    return parts


def _upper(values: Values) -> Values:
    return _by_case(values, pc.ascii_upper, str.upper)


def _lower(values: Values) -> Values:
    return _by_case(values, pc.ascii_lower, str.lower)


def _by_case(values: Values, ascii_: Callable[[Values], Values], unicode: Callable[[str], str]) -> Values:
    """ASCII by Arrow; the few distinct texts that have other characters by Unicode's full rules, which Arrow does not have."""
    array = arrayed(values, 1)
    is_plain = pc.string_is_ascii(array)
    if pc.all(is_plain).as_py() is not False:
        return ascii_(values)
    distinct = pc.unique(array.filter(pc.invert(is_plain)))
    mapping = pa.array([unicode(text.as_py()) for text in distinct], STRING)
    found = pc.take(mapping, pc.index_in(array, value_set=distinct))
    return pc.if_else(is_plain, ascii_(array), found)


def _of_text(name: str, type_: pa.DataType, kernel: Callable[[Values], Values]) -> Function:
    return Function(lambda operands, args: mapped(type_, [operands.text(args[0], name)], kernel), 1)


def _length(operands: Operands, args: list[Term]) -> Term:
    if args[0].type == BINARY:
        return mapped(INT, args, lambda values: pc.cast(pc.binary_length(values), INT))
    return mapped(INT, [operands.text(args[0], "length")], lambda values: pc.cast(pc.utf8_length(values), INT))


def _joined(operands: Operands, args: list[Term]) -> Term:
    if args and all(arg.type == BINARY for arg in args):
        return mapped(BINARY, args, lambda *values: pc.binary_join_element_wise(*values, b""))
    if not args:
        return constant("", STRING)
    terms = [operands.text(arg, "concat") for arg in args]
    return mapped(STRING, terms, lambda *values: pc.binary_join_element_wise(*values, ""))


def _joined_by(operands: Operands, args: list[Term]) -> Term:
    separator = operands.text(args[0], "concat_ws").value
    if separator is None:
        raise operands.unsupported("concat_ws with a separator that is not a constant")
    if not separator.is_valid or len(args) == 1:
        return constant("" if separator.is_valid else None, STRING)
    between = separator.as_py()

    def run(*values: Values) -> Values:
        parts = [pc.fill_null(pc.binary_join_element_wise(between, value, ""), "") for value in values]
        return pc.utf8_slice_codeunits(pc.binary_join_element_wise(*parts, ""), len(between))

    return mapped(STRING, [operands.text(arg, "concat_ws") for arg in args[1:]], run, strict=False)


def trimmed(operands: Operands, name: str, value: Term, characters: Term | None) -> Term:
    """TRIM, LTRIM or RTRIM of the characters, or of spaces."""
    wanted = " "
    if characters is not None:
        given = operands.text(characters, name).value
        if given is None:
            raise operands.unsupported(f"{name} with characters that are not a constant")
        if not given.is_valid:
            return constant(None, STRING)
        wanted = given.as_py()
    term = operands.text(value, name)
    trim = {"trim": pc.utf8_trim, "ltrim": pc.utf8_ltrim, "rtrim": pc.utf8_rtrim}[name]
    return term if not wanted else mapped(STRING, [term], lambda values: trim(values, characters=wanted))


def _trim(name: str) -> Function:
    def build(operands: Operands, args: list[Term]) -> Term:
        # LTRIM and RTRIM name the characters first, BTRIM last.
        if len(args) == 1:
            return trimmed(operands, name, args[0], None)
        return trimmed(operands, name, args[1], args[0])

    return Function(build, 1, 2)


def _btrim(operands: Operands, args: list[Term]) -> Term:
    return trimmed(operands, "trim", args[0], args[1] if len(args) == 2 else None)


def _constant_integer(operands: Operands, term: Term, name: str) -> int | None:
    found = operands.integer(term, name).value
    if found is None:
        raise operands.unsupported(f"{name} with a position or length that is not a constant")
    return found.as_py() if found.is_valid else None


def _substring(operands: Operands, args: list[Term]) -> Term:
    if args[0].type == BINARY:
        raise operands.unsupported("substring of BINARY")
    start = _constant_integer(operands, args[1], "substring")
    length = _constant_integer(operands, args[2], "substring") if len(args) == 3 else 2**31 - 1
    if start is None or length is None:
        return constant(None, STRING)
    return mapped(STRING, [operands.text(args[0], "substring")], lambda values: _part(values, start, length))


def _part(values: Values, start: int, length: int) -> Values:
    if start >= 0:
        first = max(0, start - 1)
        return pc.utf8_slice_codeunits(values, first, max(first, min(first + length, 2**31 - 1)))
    if length <= 0:
        return pc.if_else(pc.is_valid(values), "", pa.scalar(None, STRING))
    end = start + length
    # A start before the text takes from the length: the end counts from the end of the text all the same.
    if end >= 0:
        return pc.utf8_slice_codeunits(values, start, None)
    return pc.utf8_slice_codeunits(values, start, end)


def _left(operands: Operands, args: list[Term]) -> Term:
    length = _constant_integer(operands, args[1], "left")
    if length is None:
        return constant(None, STRING)
    return mapped(STRING, [operands.text(args[0], "left")], lambda values: _part(values, 1, length))


def _right(operands: Operands, args: list[Term]) -> Term:
    length = _constant_integer(operands, args[1], "right")
    if length is None:
        return constant(None, STRING)
    return mapped(
        STRING, [operands.text(args[0], "right")], lambda values: _part(values, -length if length > 0 else 0, length)
    )


def _search(name: str, kernel: Callable[[Values, str], Values]) -> Function:
    def build(operands: Operands, args: list[Term]) -> Term:
        wanted = operands.text(args[1], name).value
        if wanted is None:
            raise operands.unsupported(f"{name} of a text that is not a constant")
        if not wanted.is_valid:
            return constant(None, BOOLEAN)
        return mapped(BOOLEAN, [operands.text(args[0], name)], lambda values: kernel(values, wanted.as_py()))

    return Function(build, 2)


def _located(operands: Operands, value: Term, wanted: Term, name: str) -> Term:
    found = operands.text(wanted, name).value
    if found is None:
        raise operands.unsupported(f"{name} of a text that is not a constant")
    if not found.is_valid:
        return constant(None, INT)
    text = found.as_py()

    def run(values: Values) -> Values:
        array = arrayed(values, 1)
        at = pc.find_substring(array, text)
        if pc.all(pc.string_is_ascii(array)).as_py() is not False:
            return pc.cast(pc.add(at, 1), INT)
        # Arrow counts bytes: the characters before the place are counted in the text before it.
        before = pc.list_element(pc.split_pattern(array, text, max_splits=1), 0) if text else array
        places = numbers(pc.utf8_length(before)) + 1 if text else np.ones(len(array), np.int64)
        missing = truths(pc.equal(at, -1))
        return array_of(np.where(missing, 0, places).astype(np.int32), INT, array)

    return mapped(INT, [operands.text(value, name)], run)


def _replaced(operands: Operands, args: list[Term]) -> Term:
    wanted = operands.text(args[1], "replace").value
    by = operands.text(args[2], "replace").value if len(args) == 3 else pa.scalar("")
    if wanted is None or by is None:
        raise operands.unsupported("replace of or by a text that is not a constant")
    if not (wanted.is_valid and by.is_valid):
        return constant(None, STRING)
    term, old, new = operands.text(args[0], "replace"), wanted.as_py(), by.as_py()
    return term if not old else mapped(STRING, [term], lambda values: pc.replace_substring(values, old, new))


def _repeated(operands: Operands, args: list[Term]) -> Term:
    count = _constant_integer(operands, args[1], "repeat")
    if count is None:
        return constant(None, STRING)
    return mapped(STRING, [operands.text(args[0], "repeat")], lambda values: pc.binary_repeat(values, max(0, count)))


TEXT: dict[str, Function] = {
    "upper": _of_text("upper", STRING, _upper),
    "ucase": _of_text("ucase", STRING, _upper),
    "lower": _of_text("lower", STRING, _lower),
    "lcase": _of_text("lcase", STRING, _lower),
    "length": Function(_length, 1),
    "len": Function(_length, 1),
    "char_length": Function(_length, 1),
    "character_length": Function(_length, 1),
    "octet_length": _of_text("octet_length", INT, lambda values: pc.cast(pc.binary_length(values), INT)),
    "reverse": _of_text("reverse", STRING, pc.utf8_reverse),
    "concat": Function(_joined, 0, 100),
    "concat_ws": Function(_joined_by, 1, 100),
    "trim": _trim("trim"),
    "ltrim": _trim("ltrim"),
    "rtrim": _trim("rtrim"),
    "btrim": Function(_btrim, 1, 2),
    "substring": Function(_substring, 2, 3),
    "substr": Function(_substring, 2, 3),
    "left": Function(_left, 2),
    "right": Function(_right, 2),
    "contains": _search("contains", pc.match_substring),
    "startswith": _search("startswith", pc.starts_with),
    "endswith": _search("endswith", pc.ends_with),
    "instr": Function(lambda operands, args: _located(operands, args[0], args[1], "instr"), 2),
    "locate": Function(lambda operands, args: _located(operands, args[1], args[0], "locate"), 2),
    "position": Function(lambda operands, args: _located(operands, args[1], args[0], "position"), 2),
    "replace": Function(_replaced, 2, 3),
    "repeat": Function(_repeated, 2),
}
