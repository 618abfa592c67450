"""Random expressions and rows for them: every function and operator of the language, over extreme values of every type.

A template has holes, each with the kind of expression that may fill it: `{number}`, `{text}`, `{condition}` and so on.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal
from random import Random
from typing import Any

import pyarrow as pa

UTC_MOMENT, LOCAL_MOMENT = pa.timestamp("us", tz="UTC"), pa.timestamp("us")
DAY_US = 86_400_000_000
_CONTEXT = Context(prec=60)
FIRST_DAY, LAST_DAY = -719_162, 2_932_896
SCHEMA = pa.schema(
    {
        "n8": pa.int8(), "n16": pa.int16(), "n32": pa.int32(), "n64": pa.int64(), "f32": pa.float32(), "f64": pa.float64(),
        "d5": pa.decimal128(5, 2), "d18": pa.decimal128(18, 6), "d38": pa.decimal128(38, 0), "d38s": pa.decimal128(38, 18),
        "z": pa.bool_(), "t": pa.string(), "u": pa.string(), "digits": pa.string(), "written": pa.string(), "x": pa.binary(),
        "dt": pa.date32(), "ts": UTC_MOMENT, "tn": LOCAL_MOMENT,
    }
)  # fmt: skip

TEXTS = [
    "",
    " ",
    "a",
    "A",
    "ab",
    "aB%c_d",
    "Straße",
    "ΑΣ",
    "😀x",
    "a\\b",
    "  pad ",
    "naïve",
    "\n",
    "a\nb",
    "İ",
    "aaa",
    "x" * 50,
]
DIGITS = [
    "0",
    "-1",
    "+5",
    " 7 ",
    "127",
    "128",
    "2147483648",
    "9223372036854775808",
    "1.5",
    "-0.0",
    ".5",
    "1.",
    "1e3",
    "nan",
]
DIGITS += [
    "Infinity",
    "-inf",
    "x",
    "",
    "true",
    "F",
    "no",
    "99999999999999999999",
    "0.005",
    "123456.789",
    "1e400",
    "00012",
]
WHENS = [
    "2020-02-29",
    "2019-02-29",
    "2020-2-3",
    "2020",
    "2020-12",
    "1969-12-31 23:59:59.5",
    "2020-01-01T10:20",
    "x",
    "",
]
WHENS += [
    "2020-01-01 10:20:30.1234567",
    "2020-01-01 10:20:30 +01:30",
    "2020-01-01 24:00:00",
    "0001-01-01",
    "9999-12-31",
    " 2020-01-01 ",
]
WHENS += ["2020-01-01 1:2:3Z", "2020-01-01 10", "2020-06-30 23:59:59-18:00", "2020-13-01", "2020-01-01 x", "20-01-01"]

TEMPLATES: dict[str, list[str]] = {
    "integer": [
        "{integer} + {integer}", "{integer} - {integer}", "{integer} * {integer}", "{integer} DIV {integer}", "{exact} DIV {exact}",
        "{integer} % {integer}", "- {integer}", "abs({integer})", "pmod({integer}, {integer})", "mod({integer}, {small})",
        "CAST({number} AS BIGINT)", "CAST({number} AS INT)", "CAST({number} AS SMALLINT)", "CAST({number} AS TINYINT)",
        "CAST(digits AS INT)", "try_cast(digits AS TINYINT)", "try_cast(digits AS BIGINT)", "CAST({condition} AS INT)",
        "CAST({moment} AS BIGINT)", "try_add({integer}, {integer})", "try_subtract({integer}, {integer})",
        "try_multiply({integer}, {integer})", "try_mod({integer}, {integer})", "div({integer}, {integer})", "round({integer}, -1)",
        "round({integer})", "floor({fraction})", "ceil({fraction})", "ceiling({fraction})", "positive({integer})",
        "negative({integer})", "length({text})", "len({text})", "char_length({text})", "character_length({text})", "length(x)",
        "octet_length({text})", "instr({text}, 'a')", "locate('b', {text})", "position('ß' IN {text})", "position('x', {text})",
        "year({day})", "quarter({day})", "month({moment})", "day({day})", "dayofmonth({day})", "dayofweek({day})", "weekday({day})",
        "dayofyear({day})", "weekofyear({day})", "hour({moment})", "minute({moment})", "second({moment})", "hour(tn)", "second(tn)",
        "extract(WEEK FROM {day})", "extract(HOUR FROM {moment})", "extract(DOW FROM {day})", "datediff({day}, {day})",
        "date_diff({day}, {day})", "timestampdiff(HOUR, {moment}, {moment})", "datediff(DAY, {day}, {day})",
        "date_diff(WEEK, {moment}, {day})", "timestampdiff(MILLISECOND, {day}, {moment})", "unix_seconds({moment})",
        "unix_millis({moment})", "unix_micros({moment})", "unix_date({day})",
    ],
    "fraction": [
        "{fraction} + {number}", "{number} - {fraction}", "{fraction} * {fraction}", "{fraction} / {number}", "{integer} / {integer}",
        "{fraction} % {fraction}", "- {fraction}", "abs({fraction})", "sqrt({number})", "sign({number})", "signum({fraction})",
        "CAST({number} AS DOUBLE)", "CAST({number} AS FLOAT)", "CAST(digits AS DOUBLE)", "try_cast(digits AS FLOAT)",
        "round({fraction})", "round(f64, 2)", "round({short}, 3)",
        "CAST({moment} AS DOUBLE)", "pmod({fraction}, {number})", "try_divide({integer}, {integer})", "try_divide({fraction}, {number})",
        "CAST({condition} AS DOUBLE)",
    ],
    "decimal": [
        "{decimal} + {decimal}", "{decimal} - {exact}", "{exact} * {decimal}", "{decimal} / {exact}", "{decimal} % {exact}",
        "- {decimal}", "abs({decimal})", "CAST({exact} AS DECIMAL(20, 4))", "CAST({exact} AS DECIMAL(9, 2))",
        "CAST({exact} AS DECIMAL(38, 10))", "CAST(digits AS DECIMAL(10, 2))", "try_cast(digits AS DECIMAL(38, 3))",
        "CAST({integer} AS DECIMAL(12, 1))", "CAST({short} AS DECIMAL(20, 5))", "round({decimal}, 1)", "round({decimal})",
        "round({decimal}, -1)", "floor({decimal})",
        "ceil({decimal})", "extract(SECOND FROM {moment})", "try_divide({decimal}, {exact})", "pmod({decimal}, {exact})",
        "try_cast({exact} AS DECIMAL(4, 2))", "CAST({condition} AS DECIMAL(3, 2))",
    ],
    "text": [
        "upper({text})", "ucase({text})", "lower({text})", "lcase({text})", "{text} || {text}", "concat({text}, {integer}, {text})",
        "concat({text}, {decimal})", "concat_ws('-', {text}, NULL, {text})", "trim({text})", "ltrim({text})", "rtrim({text})",
        "btrim({text}, 'a ')", "trim(BOTH 'ab' FROM {text})", "trim(LEADING ' ' FROM {text})", "trim(TRAILING 'x' FROM {text})",
        "ltrim('a', {text})", "substring({text}, 2)", "substring({text}, 0, 2)", "substr({text}, -3, 2)", "substring({text}, -8, 5)",
        "substring({text}, 2, 0)", "substring({text}, -2, -1)", "left({text}, 2)", "right({text}, 2)", "right({text}, 0)",
        "left({text}, -1)",
        "reverse({text})", "replace({text}, 'a', 'xyz')", "replace({text}, 'b')", "repeat({text}, 2)", "repeat({text}, -1)",
        "CAST({integer} AS STRING)", "CAST({decimal} AS STRING)", "CAST({condition} AS STRING)", "CAST({day} AS STRING)",
        "CAST({moment} AS STRING)", "CAST(tn AS STRING)",
    ],
    "condition": [
        "{number} = {number}", "{number} <> {number}", "{number} < {number}", "{number} >= {number}", "{number} > {exact}",
        "{number} <=> {number}", "{fraction} <= {fraction}", "{decimal} = {decimal}", "{text} = {text}", "{text} < {text}", "x = x",
        "x < x",
        "{text} <=> {text}", "{day} > {day}", "{day} = {moment}", "{moment} <= {moment}", "tn < ts", "{condition} = {condition}",
        "{condition} AND {condition}", "{condition} OR {condition}", "NOT {condition}", "{condition} IS NULL", "{number} IS NOT NULL",
        "{condition} IS TRUE", "{condition} IS NOT FALSE", "{condition} IS UNKNOWN", "{number} IN ({number}, {number}, NULL)",
        "{integer} IN (0, 1, -1)", "{text} IN ('a', '', {text})", "{fraction} IN (0, 'NaN')", "{exact} NOT IN (1, 2.5, {decimal})",
        "{number} BETWEEN {number} AND {number}", "{text} NOT BETWEEN 'a' AND 'b'", "{text} LIKE 'a%'", "{text} LIKE '%b'",
        "{text} LIKE '%a%'", "{text} LIKE 'a'", "{text} LIKE ''", "{text} LIKE '_'", "{text} LIKE '%'", "{text} LIKE 'a%_d'",
        "{text} NOT LIKE 'a_b'", "{text} LIKE 'aB!%c!_%' ESCAPE '!'", "{text} LIKE 'a\\\\\\\\b'", "{text} ILIKE 'AB%'",
        "{integer} LIKE '1%'",
        "contains({text}, 'a')", "startswith({text}, 'a')", "endswith({text}, 'b')", "isnan({number})", "isnull({text})",
        "isnotnull({number})", "CAST(digits AS BOOLEAN)", "try_cast(digits AS BOOLEAN)", "CAST({number} AS BOOLEAN)",
        "{moment} - {moment} > INTERVAL '1' HOUR", "{day} - {day} < INTERVAL 10 DAYS", "digits = {integer}", "try_cast(digits AS INT) = n8",
        "{day} = '2020-02-29'", "{moment} >= '2020-01-01 10:20:30+01:00'", "{number} IS DISTINCT FROM {number}",
        "-({moment} - {moment}) < INTERVAL '1 02:30' DAY TO MINUTE + INTERVAL 3 SECONDS",
    ],
    "day": [
        "date_add({day}, {small})", "dateadd({day}, {small})", "date_sub({day}, {small})", "{day} + {small}", "{day} - {small}",
        "{day} + INTERVAL 3 MONTHS", "{day} - INTERVAL '1' YEAR", "{day} + INTERVAL '1' DAY", "add_months({day}, {small})",
        "last_day({day})", "trunc({day}, 'month')", "trunc({day}, 'YEAR')", "trunc({day}, 'quarter')", "trunc({day}, 'week')",
        "to_date({moment})", "date({moment})", "CAST({moment} AS DATE)", "CAST(written AS DATE)", "try_cast(written AS DATE)",
        "to_date(written)",
        "CAST(tn AS DATE)",
    ],
    "moment": [
        "{moment} + INTERVAL 1 MONTH", "{moment} - INTERVAL '2' DAYS", "{moment} + INTERVAL '1 02:03:04.5' DAY TO SECOND",
        "{day} + INTERVAL 5 HOURS", "{moment} - INTERVAL '1-2' YEAR TO MONTH", "INTERVAL 10 MINUTES + {moment}", "CAST({day} AS TIMESTAMP)",
        "CAST(written AS TIMESTAMP)", "try_cast(written AS TIMESTAMP)", "to_timestamp(written)", "timestamp({day})",
        "CAST(tn AS TIMESTAMP)",
        "date_trunc('hour', {moment})", "date_trunc('DAY', {moment})", "date_trunc('week', {moment})", "date_trunc('quarter', {moment})",
        "date_trunc('year', {moment})", "date_trunc('minute', {moment})", "date_trunc('millisecond', {moment})",
        "timestamp_seconds({small})", "timestamp_millis({small})", "timestamp_micros({small})", "CAST({small} AS TIMESTAMP)",
    ],
}  # fmt: skip
CHOICES = [
    "CASE WHEN {condition} THEN {?} ELSE {?} END", "CASE WHEN {condition} THEN {?} WHEN {condition} THEN {?} END",
    "if({condition}, {?}, {?})", "coalesce({?}, {?}, {?})", "nvl({?}, {?})", "ifnull({?}, {?})", "nvl2({text}, {?}, {?})",
    "nullif({?}, {?})", "greatest({?}, {?}, {?})", "least({?}, {?})", "({?})", "CASE {small} WHEN 1 THEN {?} WHEN n8 THEN {?} ELSE {?} END",
]  # fmt: skip
LEAVES: dict[str, list[str]] = {
    "integer": [
        "n8",
        "n16",
        "n32",
        "n64",
        "0",
        "1",
        "-1",
        "7",
        "2147483647",
        "-2147483648",
        "3000000000",
        "5L",
        "CAST(NULL AS INT)",
    ],
    "fraction": ["f32", "f64", "0.0D", "-1.5D", "2.5F", "1e10", "CAST('NaN' AS DOUBLE)"],
    "decimal": ["d5", "d18", "d38", "d38s", "1.5", "0.001", "-99.99", "12345678901234567890.5"],
    "text": ["t", "u", "'a'", "'it\\'s'", "''", "'%_'"],
    "condition": ["z", "true", "false", "CAST(NULL AS BOOLEAN)"],
    "day": ["dt", "DATE '2020-02-29'", "DATE '1969-12-31'"],
    "moment": ["ts", "TIMESTAMP '2020-01-31 10:20:30.5'", "CAST('1969-12-31 23:59:59.999999' AS TIMESTAMP)"],
    "short": [
        "CAST(d5 AS DOUBLE)",
        "CAST(n32 AS DOUBLE) / 1000",
        "CAST(n16 AS DOUBLE) / 7",
        "1.0005D",
        "-2.5e-4",
        "0.0D",
    ],
    "small": ["n8", "1", "-1", "0", "13", "100"],
}
JOINED = {"number": ["integer", "fraction", "decimal"], "exact": ["integer", "decimal"]}
KINDS = list(TEMPLATES)


def random_text(random: Random, kind: str, depth: int) -> str:
    """A random expression of a kind."""
    kind = random.choice(JOINED.get(kind, [kind]))
    if depth == 0 or kind in ("small", "short"):
        return random.choice(LEAVES[kind])
    template = random.choice(TEMPLATES[kind]) if random.random() < 0.85 else random.choice(CHOICES)
    return filled(random, template.replace("{?}", f"{{{kind}}}"), depth)


def filled(random: Random, template: str, depth: int) -> str:
    """A template with its holes filled; what fills one is in brackets where it is no leaf."""

    def fill(hole: re.Match[str]) -> str:
        text = random_text(random, hole[1], depth - 1 if random.random() < 0.6 else 0)
        return text if re.fullmatch(r"\w+|'[^ ]*'", text) else f"({text})"

    return re.sub(r"\{(\w+)\}", fill, template)


def each_template(random: Random) -> list[str]:
    """Every template once, filled with leaves; the choices for each kind."""
    found = [filled(random, template, 1) for templates in TEMPLATES.values() for template in templates]
    return found + [filled(random, choice.replace("{?}", f"{{{kind}}}"), 1) for choice in CHOICES for kind in KINDS]


def random_rows(random: Random, count: int) -> pa.Table:
    """Rows of extreme and plain values, a tenth of them null."""

    def column(field: pa.Field) -> pa.Array:
        return pa.array([None if random.random() < 0.1 else _value(random, field) for _ in range(count)], field.type)

    return pa.table([column(field) for field in SCHEMA], schema=SCHEMA)


def _value(random: Random, field: pa.Field) -> Any:
    type_ = field.type
    if pa.types.is_integer(type_):
        most = 2 ** (type_.bit_width - 1)
        return random.choice(
            [0, 1, -1, 2, 3, 10, most - 1, -most, random.randrange(-most, most), random.randrange(-100, 100)]
        )
    if pa.types.is_floating(type_):
        large = [2.0**31, -(2.0**63), 2.0**63, 1e300 if type_ == pa.float64() else 1e38, 4.9e-324, 2.0**53 + 2]
        plain = [
            0.0,
            -0.0,
            0.5,
            -0.5,
            1.5,
            2.5,
            -2.5,
            1.0,
            float("nan"),
            float("inf"),
            float("-inf"),
            0.1,
            0.49999999999999994,
        ]
        return random.choice([*large, *plain, random.uniform(-1000, 1000), random.gauss(0, 1e9)])
    if pa.types.is_decimal(type_):
        most = 10**type_.precision - 1
        digits = random.choice(
            [0, 1, -1, most, -most, 5, 15, -25, random.randint(-most, most), random.randint(-(10**5) + 1, 10**5 - 1)]
        )
        return Decimal(digits).scaleb(-type_.scale, _CONTEXT)
    if pa.types.is_boolean(type_):
        return random.random() < 0.5
    if pa.types.is_date(type_):
        return random.choice(
            [0, -1, 59, 18321, 18292, random.randint(10_000, 20_000), random.randint(FIRST_DAY, LAST_DAY)]
        )
    if pa.types.is_timestamp(type_):
        day = random.choice(
            [0, -1, 18321, 18292, random.randint(10_000, 20_000), random.randint(FIRST_DAY + 900, LAST_DAY - 900)]
        )
        return day * DAY_US + random.choice([0, 1, DAY_US - 1, 37_230_500_000, random.randrange(DAY_US)])
    if pa.types.is_binary(type_):
        return random.choice([b"", b"\x00", b"\xff", b"ab", b"\x7f\x80"])
    return random.choice({"digits": DIGITS, "written": WHENS}.get(field.name, TEXTS))
