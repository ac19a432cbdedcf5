"""PTX that adds the bias to a block of scores where it lies in registers, for GPUs with Hopper's products.

A product of Hopper leaves a block [ones, others] spread out like this, 16 of the first dimension a warp:
thread `t` holds the entries (16 (t / 32) + (t / 4) % 8 + 8 h, 8 k + 2 (t % 4) + b), in the order of 4 k + 2 h
+ b with h and b in {0, 1}. Triton hands all entries of a thread to one piece of inline assembly (`pack`).
There, in comparison with a look-up for each score:

- Distances are those of a line: 18 loads for 32 scores of a block with 64 others, at fixed places of one
  address. Only blocks with targets among their rows load each score's own.
- Which buckets are in the block is found with 32 bits, by tables.
- A bucket's edge costs two instructions a score. More than three in a block: the bucket of each score, by a
  table with one edge at most in each of its cells, four cells an octave.

Everything is exact as long as no edge lies past 2^30 s: then further apart is in the last bucket.

The text has labels and registers of its own in braces, and is the same for all threads' branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FIRST_CELL = 127 << 2
"""Of a float32 shifted right by 21 bits: its exponent and two bits, of 1.0."""

NUM_CELLS = 33 * 4
"""For all that fits into 32 bits."""

CELL_BYTES = 16
"""edge, value below it, value from it on, bucket below + 2^16 * bucket from it on."""

BUCKET_BYTES = 16
"""Value, and three steps to the next ones."""

MOST_BUCKETS = 72
"""None has more whose edges are not past `MOST_SECONDS`; a multiple of 4."""

CELLS_AT = MOST_BUCKETS * 4
"""Where the records of the cells are; before them are the values of the buckets."""

BUCKETS_AT = CELLS_AT + NUM_CELLS * CELL_BYTES
"""Where the records of the buckets are."""

NEAR_SIZE = 64
"""Tokens of a block, in both dimensions, for which the buckets of near scores are at hand."""

NEAR_BLOCKS = 3
"""So many blocks from the diagonal on are near it."""

NEAR_BYTES = NEAR_BLOCKS * NEAR_SIZE
"""Of a token: the buckets of its scores with the others of the near blocks, those of a block in the order of
threads (t % 4), k and b."""

LINE_BYTES = 128
"""Of a bucket's sums: one for each thread of a warp."""

WARP_BYTES = MOST_BUCKETS * LINE_BYTES

MOST_EDGES = 3
"""Of a block with few. 2 ** 8 times their number and the lowest bucket are its `record`; `past1` to `past3`
are what to add to offsets, in float32, for a number that is at least 1 past the edge."""

MANY, NEAR = 4, 5
"""In the place of their number: the bucket of each score is to be found; is at hand in `near`."""

MOST_SECONDS = 2**30
"""Offsets in a block are cut off there."""

ARGUMENTS = (
    "alpha",
    "distances",
    "first_one",
    "first_other",
    "length_one",
    "length_other",
    "history_end",
    "group_size",
    "one_times",
    "other_times",
    "one_offsets",
    "other_offsets",
    "one_bounds",
    "other_bounds",
    "lookup",
    "start",
    "near",
    "record",
    "past1",
    "past2",
    "past3",
)
"""After the scores. `start` is the first token of the sample. `distances` and `lookup` are the head's; what
is of tokens begins with the first of all, since fewer registers hold that."""


class Assembly(NamedTuple):
    """What `tl.inline_asm_elementwise` takes."""

    text: str
    constraints: str


SUMS = ("position_sums",)
"""After these, for `add_to_tables`: float32, of the head, from distance 0 on."""

POINTERS = frozenset(
    {"distances", "one_times", "other_times", "one_offsets", "other_offsets"}
    | {"one_bounds", "other_bounds", "lookup", "near", *SUMS}
)


class Writer:
    """Lines of PTX for blocks with `groups` times 8 others."""

    def __init__(self, groups: int, arguments: tuple[str, ...]) -> None:
        self.groups = groups
        self.size = 4 * groups
        self.arguments = arguments
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def score(self, number: int) -> str:
        return f"${self.size + number}"

    def argument(self, name: str) -> str:
        return f"${self.size * (2 + self.arguments.index(name))}"

    def entries(self) -> list[tuple[int, int, int, int]]:
        """Of each entry of a thread its number, k, h and b."""
        return [(4 * k + 2 * h + b, k, h, b) for k in range(self.groups) for h in (0, 1) for b in (0, 1)]

    def made(self, output: str) -> Assembly:
        kinds = [output] * self.size + ["f"] * self.size
        for name in self.arguments:
            kinds += ["l" if name in POINTERS else "f" if name == "alpha" else "r"] * self.size
        return Assembly("{\n" + "\n".join(self.lines) + "\n}", ",".join(kinds))


def add_bias(groups: int, rows_first: bool, near: bool) -> Assembly:
    """Half of the scores of a block, from the products: times half of alpha, plus half of the bias.

    rows_first: the first dimension is that of rows, not of keys. near: buckets near the diagonal are given.
    """
    text = Writer(groups, ARGUMENTS)
    places(text)
    read_record(text)
    text.add(
        "mov.f32 v0, 0f00000000;",
        f"mad.wide.u32 address, lowest, {BUCKET_BYTES}, {text.argument('lookup')};",
        f"@few ld.global.nc.v4.f32 {{v0, v1, v2, v3}}, [address+{BUCKETS_AT}];",
    )
    _load_line(text, rows_first)
    if near:
        load_near_buckets(text, rows_first)
    _add_positions(text, rows_first)
    if near:
        text.add("@!near bra.uni NOT_NEAR;")
        for number, k, h, b in text.entries():
            near_bucket(text, "t", k, h, b)
            text.add(
                f"mad.wide.u32 address, t, 4, {text.argument('lookup')};",
                "ld.global.nc.f32 f, [address];",
                f"add.f32 ${number}, s{number}, f;",
            )
        text.add("bra.uni END;", "NOT_NEAR:")
    _add_few(text)
    text.add("bra.uni END;", "MANY:")
    load_bounds(text, rows_first)
    is_wide(text)
    text.add("@wide bra.uni WIDE;")
    load_near(text)
    for number, k, h, b in text.entries():
        near_seconds(text, k, h, b)
        _add_from_cell(text, number)
    text.add("bra.uni END;", "WIDE:")
    last_places(text)
    for number, k, h, b in text.entries():
        wide_seconds(text, k, h, b)
        _add_from_cell(text, number)
    text.add("END:")
    return text.made("=f")


def places(text: Writer) -> None:
    """Of the thread: `one`, `other` in the block; `at_one`, `at_other` in the sample. And all registers."""
    size = text.size
    text.add(
        ".reg .pred toeplitz, near, few, wide, p, p1, p2, p3;",
        ".reg .b32 thread, one, other, at_one, at_other, zero, rows_end, distance;",
        ".reg .b32 t, low, least, span, cell, lowest;",
        ".reg .b64 address, wide_t, first_low, first_high, second_low, second_high, least64, most64, record;",
        f".reg .b32 d<{2 * text.groups}>, e<8>;",
        f".reg .f32 s<{size}>, line<{2 * text.groups + 2}>, a<2>, c<4>, v<4>, f, g;",
        f".reg .b32 x<{2 * text.groups}>;",  # offsets in float32 of the others, or buckets of near scores
        "mov.u32 thread, %tid.x;",
        "shr.u32 one, thread, 2;",
        "and.b32 one, one, 7;",
        "shr.u32 t, thread, 5;",
        "mad.lo.s32 one, t, 16, one;",
        "and.b32 other, thread, 3;",
        "shl.b32 other, other, 1;",
        f"add.s32 at_one, one, {text.argument('first_one')};",
        f"add.s32 at_other, other, {text.argument('first_other')};",
        # Always zero, but a compiler cannot know. Where little is done seldom, it keeps nothing ready for it.
        f"shr.s32 zero, {text.argument('first_other')}, 31;",
    )


def read_record(text: Writer) -> None:
    """`few`, `near`, `lowest`; p1 to p3 say which edges there are if there are few, c1 to c3 where."""
    record = text.argument("record")
    text.add(
        f"and.b32 lowest, {record}, 255;",
        f"shr.u32 t, {record}, 8;",
        f"setp.le.u32 few, t, {MOST_EDGES};",
        f"setp.eq.u32 near, t, {NEAR};",
    )
    for edge in range(1, MOST_EDGES + 1):
        text.add(
            f"setp.ge.and.u32 p{edge}, t, {edge}, few;", f"mov.b32 c{edge}, {text.argument(f'past{edge}')};"
        )


def load_near_buckets(text: Writer, rows_first: bool) -> None:
    """If near, the thread's buckets, four to a register: x0.. of its first row, then the rest."""
    first, second = ("one", "other") if rows_first else ("other", "one")
    text.add(
        f"sub.s32 low, {text.argument(f'first_{first}')}, {text.argument(f'first_{second}')};",
        f"add.s32 t, at_one, {text.argument('start')};",
        f"mul.wide.s32 wide_t, t, {NEAR_BYTES};",
        f"add.s64 address, wide_t, {text.argument('near')};",
        f"mad.lo.u32 low, other, {text.groups}, low;",
        "cvt.u64.u32 wide_t, low;",
        "add.s64 address, address, wide_t;",
    )
    size = text.groups // 2
    for h in (0, 1):
        names = ", ".join(f"x{size * h + n}" for n in range(size))
        text.add(f"@near ld.global.nc.v{size}.b32 {{{names}}}, [address+{8 * h * NEAR_BYTES}];")


def near_bucket(text: Writer, name: str, k: int, h: int, b: int) -> None:
    """One of the buckets that `load_near_buckets` loaded."""
    byte = 2 * k + b
    text.add(f"bfe.u32 {name}, x{text.groups // 2 * h + byte // 4}, {8 * (byte % 4)}, 8;")


def load_bounds(text: Writer, rows_first: bool) -> None:
    """`least64` and `most64`, the least and the largest time that passed, int64."""
    for name, low, high in (("one", "first_low", "first_high"), ("other", "second_low", "second_high")):
        text.add(
            f"add.s32 t, {text.argument(f'first_{name}')}, {text.argument('start')};",
            "mul.wide.s32 wide_t, t, 16;",
            f"add.s64 address, wide_t, {text.argument(f'{name}_bounds')};",
            f"ld.global.nc.v2.s64 {{{low}, {high}}}, [address];",
        )
    if rows_first:
        text.add("sub.s64 least64, first_low, second_high;", "sub.s64 most64, first_high, second_low;")
    else:
        text.add("sub.s64 least64, second_low, first_high;", "sub.s64 most64, second_high, first_low;")


def load_offsets(text: Writer, kind: str, others: str, ones: str) -> None:
    """The offsets of the thread's others, `others`0.., and of its two ones: two float32, then the same two as
    integers, for each pair of tokens."""
    start = 8 if kind == "u32" else 0
    text.add(
        f"mad.lo.s32 t, {text.argument('start')}, 2, at_other;",
        "mul.wide.s32 wide_t, t, 8;",
        f"add.s64 address, wide_t, {text.argument('other_offsets')};",
    )
    for k in range(text.groups):
        place = start + 64 * k
        names = f"{others}{2 * k}, {others}{2 * k + 1}"
        text.add(f"ld.global.nc.v2.{kind} {{{names}}}, [address+{place}];")
    text.add(
        "and.b32 t, at_one, 1;",
        "mul.lo.s32 t, t, -4;",
        f"mad.lo.s32 low, {text.argument('start')}, 2, at_one;",
        "mul.wide.s32 wide_t, low, 8;",
        f"add.s64 address, wide_t, {text.argument('one_offsets')};",
        "cvt.s64.s32 wide_t, t;",
        "add.s64 address, address, wide_t;",
    )
    for h in (0, 1):
        text.add(f"ld.global.nc.{kind} {ones}{h}, [address+{start + 64 * h}];")


def find_line(text: Writer, rows_first: bool) -> None:
    """`toeplitz`, whether all rows are of the history, and `distance`, of the thread's first entry."""
    if rows_first:
        text.add(
            "mov.u32 t, %ntid.x;",
            "shr.u32 t, t, 1;",
            f"add.s32 rows_end, t, {text.argument('first_one')};",
            "sub.s32 distance, at_one, at_other;",
        )
    else:
        text.add(
            f"add.s32 rows_end, {text.argument('first_other')}, {8 * text.groups};",
            "sub.s32 distance, at_other, at_one;",
        )
    text.add(f"setp.le.s32 toeplitz, rows_end, {text.argument('history_end')};")


def _load_line(text: Writer, rows_first: bool) -> None:
    find_line(text, rows_first)
    text.add(
        "@!toeplitz bra.uni NO_LINE;",
        "mul.wide.s32 wide_t, distance, 4;",
        f"add.s64 address, wide_t, {text.argument('distances')};",
    )
    sign = -1 if rows_first else 1
    for u in range(-1, text.groups):
        for b in (0, 1):
            offset = sign * (32 * u + 4 * b)
            text.add(f"ld.global.nc.f32 line{2 * (u + 1) + b}, [address+{offset}];")
    text.add("NO_LINE:")


def cell_of(text: Writer, seconds: str) -> None:
    """`record`: the address of the cell of so many seconds, unsigned."""
    text.add(
        f"max.u32 t, {seconds}, 1;",
        "cvt.rn.f32.u32 f, t;",
        "mov.b32 t, f;",
        "shr.u32 t, t, 21;",
        f"mad.wide.u32 record, t, {CELL_BYTES}, {text.argument('lookup')};",
        f"sub.s64 record, record, {FIRST_CELL * CELL_BYTES - CELLS_AT};",
    )


def _add_positions(text: Writer, rows_first: bool) -> None:
    """The scores s0.. with their parts of the position and v0."""
    text.add("@!toeplitz bra.uni ALONE;")
    for number in range(2 * text.groups + 2):
        text.add(f"add.f32 line{number}, line{number}, v0;")
    for number, k, h, b in text.entries():
        text.add(
            f"fma.rn.f32 s{number}, {text.score(number)}, {text.argument('alpha')}, "
            f"line{2 * (k - h + 1) + b};"
        )
    text.add("bra.uni PLACED;", "ALONE:")
    for number, k, h, b in text.entries():
        own_distance(text, k, h, b, rows_first)
        text.add(
            "mul.wide.s32 wide_t, distance, 4;",
            f"add.s64 address, wide_t, {text.argument('distances')};",
            "ld.global.nc.f32 f, [address];",
            "add.f32 f, f, v0;",
            f"fma.rn.f32 s{number}, {text.score(number)}, {text.argument('alpha')}, f;",
        )
    text.add("PLACED:")


def own_distance(text: Writer, k: int, h: int, b: int, rows_first: bool) -> None:
    """`distance` of one entry of any row: targets stand behind the history, those of a group in a line."""
    row, key = ("low", "cell") if rows_first else ("cell", "low")
    text.add(
        f"add.s32 low, at_one, {8 * h};",
        "add.s32 low, low, zero;",
        f"add.s32 cell, at_other, {8 * k + b};",
        f"sub.s32 distance, {row}, {key};",
        f"setp.ge.s32 p, {row}, {text.argument('history_end')};",
        f"setp.lt.and.s32 p, {key}, {text.argument('history_end')}, p;",
        f"sub.s32 t, {row}, {text.argument('history_end')};",
        "max.s32 t, t, 0;",
        f"rem.u32 e7, t, {text.argument('group_size')};",
        "sub.s32 t, e7, t;",
        "@p add.s32 distance, distance, t;",
    )


def _add_few(text: Writer) -> None:
    text.add("@!few bra.uni MANY;")
    for edge in (1, 2, 3):
        text.add(f"@!p{edge} bra.uni ADDED;")
        if edge == 1:
            load_offsets(text, "f32", "x", "a")
        for h in (0, 1):
            text.add(f"add.f32 c0, a{h}, c{edge};" if h == 0 else f"add.f32 g, a{h}, c{edge};")
        for number, k, h, b in text.entries():
            text.add(
                f"add.sat.f32 f, {'g' if h else 'c0'}, x{2 * k + b};",
                f"fma.rn.f32 s{number}, f, v{edge}, s{number};",
            )
    text.add("ADDED:")
    for number in range(text.size):
        text.add(f"mov.f32 ${number}, s{number};")


def is_wide(text: Writer) -> None:
    """`wide`: some difference of two times does not fit into 32 bits, or some offset was cut off."""
    text.add(
        f"setp.le.s64 wide, least64, -{MOST_SECONDS};",
        "setp.ge.s64 p, most64, 2147483647;",
        "or.pred wide, wide, p;",
        "sub.s64 wide_t, most64, least64;",
        f"setp.ge.s64 p, wide_t, {MOST_SECONDS};",
        "or.pred wide, wide, p;",
    )


def load_near(text: Writer) -> None:
    """For `near_seconds`: offsets of others in d0.., of ones, with the least difference, in e4 and e5."""
    text.add("cvt.u32.u64 least, least64;")
    load_offsets(text, "u32", "d", "e")
    text.add("add.u32 e4, e0, least;", "add.u32 e5, e1, least;")


def near_seconds(text: Writer, k: int, h: int, b: int) -> None:
    """`span`: the seconds that passed."""
    text.add(f"add.s32 span, e{4 + h}, d{2 * k + b};", "abs.s32 span, span;")


def last_places(text: Writer) -> None:
    """For `wide_seconds`."""
    text.add(f"sub.s32 e4, {text.argument('length_one')}, 1;")
    text.add(f"sub.s32 e5, {text.argument('length_other')}, 1;")


def wide_seconds(text: Writer, k: int, h: int, b: int) -> None:
    """`span`: the seconds that passed, cut off at 2^31 - 1, from the times themselves."""
    text.add(f"add.s32 low, at_one, {8 * h};", f"add.s32 cell, at_other, {8 * k + b};")
    text.add("add.s32 low, low, zero;")
    for at, last, name, time in (
        ("low", "e4", "one_times", "first_low"),
        ("cell", "e5", "other_times", "second_low"),
    ):
        text.add(
            f"min.s32 {at}, {at}, {last};",
            f"add.s32 {at}, {at}, {text.argument('start')};",
            f"mul.wide.s32 wide_t, {at}, 8;",
            f"add.s64 address, wide_t, {text.argument(name)};",
            f"ld.global.nc.s64 {time}, [address];",
        )
    text.add(
        "sub.s64 wide_t, first_low, second_low;",
        "abs.s64 wide_t, wide_t;",
        "min.s64 wide_t, wide_t, 2147483647;",
        "cvt.u32.u64 span, wide_t;",
    )


def _add_from_cell(text: Writer, number: int) -> None:
    cell_of(text, "span")
    text.add(
        "ld.global.nc.v4.b32 {e0, f, g, e3}, [record];",
        "setp.ge.u32 p, span, e0;",
        "selp.f32 f, g, f, p;",
        f"add.f32 ${number}, s{number}, f;",
    )


def add_to_tables(groups: int, kind: str, near: bool) -> Assembly:
    """Adds the gradients of a block's scores [rows, keys] to the sums by distance and by bucket. No output.

    kind: bf16 or fp16, what the gradients of a line are rounded to, as they are for the other products.
    """
    text = Writer(groups, (*ARGUMENTS, *SUMS))
    places(text)
    find_line(text, True)
    read_record(text)
    if near:
        load_near_buckets(text, True)
    _declare_sums(text)
    if near:
        text.add("@!near bra.uni NOT_NEAR;")
        for number, k, h, b in text.entries():
            near_bucket(text, "bucket", k, h, b)
            text.add(f"mad.lo.u32 at_bucket, bucket, {LINE_BYTES}, mine;")
            _add_to_bucket(text, text.score(number))
        text.add("bra.uni POSITIONS;", "NOT_NEAR:")
    _sum_few(text)
    text.add("MANY:")
    load_bounds(text, True)
    is_wide(text)
    text.add("@wide bra.uni WIDE;")
    load_near(text)
    _sum_many(text, near_seconds)
    text.add("bra.uni POSITIONS;", "WIDE:")
    last_places(text)
    _sum_many(text, wide_seconds)
    text.add("POSITIONS:", "@!toeplitz bra.uni ALONE;")
    _sum_line(text, "bf16x2" if kind == "bf16" else "f16x2")
    text.add("bra.uni END;", "ALONE:")
    for number, k, h, b in text.entries():
        own_distance(text, k, h, b, True)
        text.add(
            "mul.wide.s32 wide_t, distance, 4;",
            f"add.s64 address, wide_t, {text.argument('position_sums')};",
            f"setp.neu.f32 p, {text.score(number)}, 0f00000000;",
            f"@p red.global.add.f32 [address], {text.score(number)};",
        )
    text.add("END:")
    for number in range(text.size):
        text.add(f"mov.b32 ${number}, 0;")
    return text.made("=r")


def _declare_sums(text: Writer) -> None:
    lines = text.groups + 2
    text.add(
        ".reg .pred q, q0, q1, q2;",
        ".reg .b32 lane, source, chosen, bucket, mine, at_bucket;",
        ".reg .f32 total, part, sum, sum0, sum1;",
        ".reg .b16 half0, half1;",
        f".reg .b32 w<{lines + 1}>, n<{lines}>, y<{lines + 1}>;",
        "and.b32 lane, thread, 31;",
        "mov.u32 mine, bucket_sums;",
        "shr.u32 t, thread, 5;",
        f"mad.lo.u32 mine, t, {WARP_BYTES}, mine;",
        "mad.lo.u32 mine, lane, 4, mine;",
    )


def _sum_few(text: Writer) -> None:
    """By bucket, where there are few: what is past each edge."""
    text.add("@!few bra.uni MANY;", f"mad.lo.u32 at_bucket, lowest, {LINE_BYTES}, mine;")
    _tree(text, "total", [text.score(number) for number in range(text.size)])
    text.add("@!p1 bra.uni LAST;")
    load_offsets(text, "f32", "x", "a")
    for edge in (1, 2, 3):
        if edge > 1:
            text.add(f"@!p{edge} bra.uni LAST;")
        text.add(f"add.f32 f, a0, c{edge};", f"add.f32 g, a1, c{edge};")
        for name in ("sum0", "sum1"):
            text.add(f"mov.f32 {name}, 0f00000000;")
        for number, k, h, b in text.entries():
            text.add(
                f"add.sat.f32 part, {'g' if h else 'f'}, x{2 * k + b};",
                f"fma.rn.f32 sum{b}, part, {text.score(number)}, sum{b};",
            )
        text.add("add.f32 sum, sum0, sum1;", "sub.f32 part, total, sum;")
        _add_to_bucket(text, "part")
        text.add(f"add.u32 at_bucket, at_bucket, {LINE_BYTES};", "mov.f32 total, sum;")
    text.add("LAST:")
    _add_to_bucket(text, "total")
    text.add("bra.uni POSITIONS;")


def _tree(text: Writer, name: str, terms: list[str]) -> None:
    """`name` is the sum; in four parts, which do not wait for one another."""
    parts = ["sum", "sum0", "sum1", "part"]
    for part, term in zip(parts, terms, strict=False):
        text.add(f"mov.f32 {part}, {term};")
    for number, term in enumerate(terms[4:]):
        text.add(f"add.f32 {parts[number % 4]}, {parts[number % 4]}, {term};")
    text.add("add.f32 sum, sum, sum0;", "add.f32 sum1, sum1, part;", f"add.f32 {name}, sum, sum1;")


def _add_to_bucket(text: Writer, name: str) -> None:
    """Adds a number to the thread's own sum at `at_bucket`."""
    text.add(
        "ld.shared.f32 v0, [at_bucket];",
        f"add.f32 v0, v0, {name};",
        "st.shared.f32 [at_bucket], v0;",
    )


def _sum_many(text: Writer, seconds: Callable[[Writer, int, int, int], None]) -> None:
    """By bucket, each score's own."""
    for number, k, h, b in text.entries():
        seconds(text, k, h, b)
        cell_of(text, "span")
        text.add(
            "ld.global.nc.v4.b32 {e0, f, g, e3}, [record];",
            "setp.ge.u32 p, span, e0;",
            "and.b32 bucket, e3, 65535;",
            "shr.u32 t, e3, 16;",
            "selp.b32 bucket, t, bucket, p;",
            f"mad.lo.u32 at_bucket, bucket, {LINE_BYTES}, mine;",
        )
        _add_to_bucket(text, text.score(number))


def begin_sums(warps: int) -> str:
    """Before the first `add_to_tables` of a program: its sums by bucket, zeros. One argument, not used."""
    lines = [
        f".shared .align 1024 .b8 bucket_sums[{warps * WARP_BYTES}];",
        "{",
        ".reg .b32 mine, thread;",
        "mov.u32 thread, %tid.x;",
        "mov.u32 mine, bucket_sums;",
        "mad.lo.u32 mine, thread, 16, mine;",
    ]
    for place in range(0, WARP_BYTES, 512):
        lines.append(f"st.shared.v4.f32 [mine+{warps * place}], {{{', '.join(['0f00000000'] * 4)}}};")
    return "\n".join([*lines, "bar.sync 0;", "mov.b32 $0, 0;", "}"])


def finish_sums(warps: int) -> str:
    """After the last: adds the program's sums by bucket to those of all. Arguments: one that is not used,
    where the head's are, and how many."""
    lines = [
        "{",
        ".reg .pred p;",
        ".reg .b32 mine, thread, lane, at, bucket;",
        ".reg .b64 address, wide_t;",
        ".reg .f32 f, sum<4>;",
        "bar.sync 0;",
        "mov.u32 thread, %tid.x;",
        "mov.u32 mine, bucket_sums;",
        f"mad.lo.u32 mine, thread, {LINE_BYTES}, mine;",
        *(f"mov.f32 sum{n}, 0f00000000;" for n in range(4)),
        f"setp.lt.u32 p, thread, {MOST_BUCKETS};",
    ]
    for turn in range(32):
        lines += [
            f"add.u32 lane, thread, {turn};",  # no two threads of a warp in the same bank
            "and.b32 lane, lane, 31;",
            "mad.lo.u32 at, lane, 4, mine;",
        ]
        for warp in range(warps):
            lines += [
                f"@p ld.shared.f32 f, [at+{warp * WARP_BYTES}];",
                f"@p add.f32 sum{warp % 4}, sum{warp % 4}, f;",
            ]
    lines += [
        "add.f32 sum0, sum0, sum1;",
        "add.f32 sum2, sum2, sum3;",
        "add.f32 sum0, sum0, sum2;",
        "setp.lt.u32 p, thread, $3;",
        "mul.wide.u32 wide_t, thread, 4;",
        "add.s64 address, wide_t, $2;",
        "setp.neu.and.f32 p, sum0, 0f00000000, p;",
        "@p red.global.add.f32 [address], sum0;",
        "mov.b32 $0, 0;",
        "}",
    ]
    return "\n".join(lines)


def _sum_line(text: Writer, kind: str) -> None:
    """By distance, where rows are one after the other.

    Both of a thread's rows are added, eight columns apart; pairs of neighbours w0.. then begin at column 8 (n
    - 2), w0 empty. The rows of a warp are turned by their number, first by one column, then by pairs; then
    they are added up, so that each thread keeps a part.
    """
    count = text.groups + 2
    text.add("mov.b32 w0, 0;", f"mov.b32 w{count}, 0;", f"mov.b32 y{count}, 0;")
    for number in range(1, count):
        u = number - 2
        for b in (0, 1):
            name = ("sum0", "sum1")[b]
            low = text.score(4 * u + b) if u >= 0 else None
            high = text.score(4 * (u + 1) + 2 + b) if u + 1 < text.groups else None
            if low and high:
                text.add(f"add.f32 {name}, {low}, {high};")
            else:
                text.add(f"mov.f32 {name}, {low or high};")
        text.add(f"cvt.rn.{kind}.f32 w{number}, sum1, sum0;")
    text.add(
        "and.b32 cell, lane, 3;",
        "shr.u32 t, lane, 2;",  # the row
        "and.b32 low, t, 1;",
        "setp.eq.u32 q, low, 1;",
        f"selp.b32 chosen, {0x5432}, {0x3210}, q;",
        "setp.eq.u32 q, cell, 0;",
        "add.u32 source, lane, 1;",
        "and.b32 source, source, 3;",
        "and.b32 low, lane, 28;",
        "or.b32 source, source, low;",
    )
    for number in range(count):
        text.add(
            f"selp.b32 span, w{number + 1}, w{number}, q;",
            f"shfl.sync.idx.b32 n{number}, span, source, 31, -1;",
            f"prmt.b32 y{number}, w{number}, n{number}, chosen;",
        )
    text.add(
        "shr.u32 t, t, 1;",
        "setp.lt.u32 q, cell, t;",
        "add.u32 source, cell, t;",
        "and.b32 source, source, 3;",
        "or.b32 source, source, low;",
    )
    for number in range(count):
        text.add(
            f"selp.b32 span, y{number + 1}, y{number}, q;",
            f"shfl.sync.idx.b32 w{number}, span, source, 31, -1;",
        )
    _scatter(text, kind, count)


def _scatter(text: Writer, kind: str, count: int) -> None:
    """Sums w0.. over the eight rows of lanes, halved among them three times, and adds them to memory."""
    text.add("mov.b32 e7, 0;", "mov.b32 t, 0;", "mov.f32 v0, 0f00000000;")
    for bit, distance in enumerate((16, 8, 4)):
        text.add(f"and.b32 span, lane, {distance};", f"setp.ne.u32 q{bit}, span, 0;")
    half = (count + 1) // 2
    for number in range(half):
        upper = f"w{half + number}" if half + number < count else "e7"
        text.add(
            f"selp.b32 span, w{number}, {upper}, q0;",
            f"selp.b32 y{number}, {upper}, w{number}, q0;",
            f"shfl.sync.bfly.b32 n{number}, span, 16, 31, -1;",
        )
        _unpack(text, kind, f"y{number}", (f"s{2 * number}", f"s{2 * number + 1}"))
        _unpack(text, kind, f"n{number}", ("sum0", "sum1"))
        for b in (0, 1):
            text.add(f"add.f32 s{2 * number + b}, s{2 * number + b}, sum{b};")
    text.add(f"@q0 add.u32 t, t, {half};")
    for bit, distance in ((1, 8), (2, 4)):
        kept, half = half, (half + 1) // 2
        for number in range(2 * half):
            upper = f"s{2 * half + number}" if half + number // 2 < kept else "v0"
            text.add(
                f"selp.f32 f, s{number}, {upper}, q{bit};",
                f"selp.f32 g, {upper}, s{number}, q{bit};",
                f"shfl.sync.bfly.b32 part, f, {distance}, 31, -1;",
                f"add.f32 s{number}, g, part;",
            )
        text.add(f"@q{bit} add.u32 t, t, {half};")
    # This lane has sums from number t on; those that others have too, or that there are not, are zeros.
    text.add(
        "shl.b32 span, t, 3;",
        "add.u32 span, span, other;",
        "shr.u32 low, lane, 2;",
        "add.s32 distance, distance, other;",
        "sub.s32 distance, distance, low;",  # of the warp's first row and the block's first key
        "sub.s32 distance, distance, span;",
        "add.s32 distance, distance, 16;",
        "mul.wide.s32 wide_t, distance, 4;",
        f"add.s64 address, wide_t, {text.argument('position_sums')};",
    )
    for number in range(2 * half):
        text.add(
            f"setp.neu.f32 q, s{number}, 0f00000000;",
            f"@q red.global.add.f32 [address+{-32 * (number // 2) - 4 * (number % 2)}], s{number};",
        )


def _unpack(text: Writer, kind: str, pair: str, values: tuple[str, str]) -> None:
    if kind == "bf16x2":
        text.add(f"shl.b32 low, {pair}, 16;", f"and.b32 cell, {pair}, {0xFFFF0000};")
        text.add(f"mov.b32 {values[0]}, low;", f"mov.b32 {values[1]}, cell;")
        return
    text.add(
        f"and.b32 low, {pair}, 65535;",
        f"shr.u32 cell, {pair}, 16;",
        "cvt.u16.u32 half0, low;",
        "cvt.u16.u32 half1, cell;",
        f"cvt.f32.f16 {values[0]}, half0;",
        f"cvt.f32.f16 {values[1]}, half1;",
    )
