"""PTX that adds the bias to a block of scores in registers, for GPUs with Hopper's matrix instructions.

The first dimension of a block, called `one`, holds the tokens that the program owns (rows, or keys in the
backward kernel of keys); the second, called `other`, holds the tokens that it visits. A Hopper instruction
leaves the block distributed like this, with 16 tokens of `one` per warp: thread `t` holds the entries

    (16 (t / 32) + (t / 4) % 8 + 8 h, 8 k + 2 (t % 4) + b)        with h and b in {0, 1}

in the order of 4 k + 2 h + b. Triton hands all entries of a thread to one piece of inline assembly (`pack`),
which adds two parts to each score:

- Position: scores on one diagonal of the block share a distance, so 32 scores of a block with 64 tokens of
  `other` take 18 loads at fixed offsets of one address. Only blocks with targets among their rows load an
  entry per score.
- Time: a record says which time buckets occur in the block, so that most blocks look nothing up.

`packed` prepares four tables:

    record   per block, 16 bytes: the lowest bucket + 256 * the number of bucket edges that lie in the block
             (0 to MOST_EDGES; MANY or NEAR instead of it if there are more); then for each edge a float32 to
             add to the time offsets, so that the sum is at least 1 for scores past the edge. An edge costs
             two instructions per score.
    near     per token, NEAR_BYTES bytes (kind NEAR): the bucket of each score near the diagonal
    lookup   per head (kind MANY, and the buckets' values): MOST_BUCKETS values; then NUM_CELLS cells of
             CELL_BYTES, four per octave of seconds with at most one edge each: the edge, the value below it,
             the value from it on, and both buckets; then BUCKET_BYTES per bucket, its value and three steps
    offsets  per token, float32 seconds from an end of its block (`kernels.times_kernel`)

All of it is exact if no edge lies past 2^30 s: times further apart are in the last bucket. The text keeps its
labels and registers in braces, and all threads take the same branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

FIRST_CELL = 127 << 2
"""Number of the cell of 1.0 s: a float32 shifted right by 21 bits, which leaves its exponent and two more
bits."""

NUM_CELLS = 33 * 4
"""Number of cells, enough for all seconds that fit into 32 bits."""

CELL_BYTES = 16
"""Bytes per cell: edge, value below it, value from it on, bucket below + 2^16 * bucket from it on; 4 bytes
each."""

BUCKET_BYTES = 16
"""Bytes per bucket: its value and three steps to the values of the next buckets; 4 bytes each."""

MOST_BUCKETS = 72
"""Upper limit on buckets, a multiple of 4; more buckets would have edges past `MOST_SECONDS`."""

CELLS_AT = MOST_BUCKETS * 4
"""Byte offset of the cells in `lookup`; the values of the buckets come before them."""

BUCKETS_AT = CELLS_AT + NUM_CELLS * CELL_BYTES
"""Byte offset of the buckets and their steps in `lookup`."""

BLOCK_TOKENS = 64
"""Tokens per block, in both dimensions."""

GROUPS = BLOCK_TOKENS // 8
"""Groups of 8 tokens of `other` per block."""

WARPS = BLOCK_TOKENS // 16
"""Warps per program."""

SCORES = 4 * GROUPS
"""Scores per thread."""

NEAR_BLOCKS = 3
"""Blocks that count as near the diagonal, including the one on it."""

NEAR_BYTES = NEAR_BLOCKS * BLOCK_TOKENS
"""Bytes per token: the buckets of its scores with the tokens of the near blocks; within a block, in the order
of threads (t % 4), k and b."""

LINE_BYTES = 128
"""Bytes of one bucket's sums: a float32 for each thread of a warp."""

WARP_BYTES = MOST_BUCKETS * LINE_BYTES

LINE_STEP = 80
"""Floats from one row of a warp to the next in `lines`, the memory that sums by distance: 64 scores, eight
more columns and eight zeros."""

LINES_BYTES = 4 * (8 + 8 * LINE_STEP + 32)
"""Bytes of a warp's `lines`; its last threads read past the last row and drop what they read."""

SHARED_STEP = 1024
"""Triton's own shared memory follows what is declared here, at a multiple of this number of bytes."""

MOST_EDGES = 3
"""Most edges that a record holds; a block with more has none in its record."""

RECORD_BYTES = 16

MANY, NEAR = 4, 5
"""Kinds that a record holds in place of the number of edges: look each bucket up, or read it from `near`."""

MOST_SECONDS = 2**30
"""No bucket edge lies past this number of seconds."""

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
    "lookup",
    "start",
    "near",
    "record",
)
"""Operands after the scores. `start` is the first token of the sample; `distances` and `lookup` belong to the
head, `record` to the block. Pointers to per-token numbers point to the first token of all samples, which
takes fewer registers than a pointer per sample."""


class Assembly(NamedTuple):
    """Text and constraints for `tl.inline_asm_elementwise`."""

    text: str
    constraints: str


SUMS = ("position_sums",)
"""Further operand of `add_to_tables`: a pointer to the head's float32 sums, at distance 0."""

POINTERS = frozenset(
    {"distances", "one_times", "other_times", "one_offsets", "other_offsets"}
    | {"lookup", "near", "record", *SUMS}
)


class Writer:
    """Collects lines of PTX."""

    def __init__(self, arguments: tuple[str, ...]) -> None:
        self.arguments = arguments
        self.lines: list[str] = []

    def add(self, *lines: str) -> None:
        self.lines += lines

    def score(self, number: int) -> str:
        return f"${SCORES + number}"

    def argument(self, name: str) -> str:
        return f"${SCORES * (2 + self.arguments.index(name))}"

    def point(self, index: str, size: int, name: str) -> tuple[str, str]:
        """Return the lines that let `address` point to entry `index`, of `size` bytes, of an argument."""
        return (f"mul.wide.s32 wide_t, {index}, {size};", f"add.s64 address, wide_t, {self.argument(name)};")

    def entries(self) -> list[tuple[int, int, int, int]]:
        """List the number, k, h and b of each entry of a thread."""
        return [(4 * k + 2 * h + b, k, h, b) for k in range(GROUPS) for h in (0, 1) for b in (0, 1)]

    def made(self, output: str) -> Assembly:
        kinds = [output] * SCORES + ["f"] * SCORES
        for name in self.arguments:
            kinds += ["l" if name in POINTERS else "f" if name == "alpha" else "r"] * SCORES
        return Assembly("{\n" + "\n".join(self.lines) + "\n}", ",".join(kinds))


def add_bias(rows_first: bool) -> Assembly:
    """Turn the products of a block into half of its scores: times alpha / 2, plus half of the bias.

    rows_first: the first dimension is rows, not keys.
    """
    text = Writer(ARGUMENTS)
    places(text)
    read_record(text)
    # These loads have no branches between them, so they run while the product is awaited. Only loads whose
    # result may stay undefined are predicated: a register that is not written in every turn of a loop stays
    # live through all of it.
    _load_line(text, rows_first)
    text.add(
        f"mad.wide.u32 address, lowest, {BUCKET_BYTES}, {text.argument('lookup')};",
        f"ld.global.nc.v4.f32 {{v0, v1, v2, v3}}, [address+{BUCKETS_AT}];",
        "selp.f32 v0, v0, 0f00000000, few;",
    )
    load_offsets(text)
    _add_positions(text, rows_first)
    text.add("@!near bra.uni NOT_NEAR;")
    load_near_buckets(text, rows_first)
    text.add("mov.u32 low, time_values;")
    for number, k, h, b in text.entries():
        near_bucket(text, "t", k, h, b)
        text.add("mad.lo.u32 t, t, 4, low;", "ld.shared.f32 f, [t];", f"add.f32 ${number}, s{number}, f;")
    text.add("bra.uni END;", "NOT_NEAR:")
    _add_few(text)
    text.add("bra.uni END;", "MANY:")
    _each(text, _add_from_cell)
    text.add("END:")
    return text.made("=f")


def places(text: Writer) -> None:
    """Find the thread's `one` and `other` in the block, `at_one` and `at_other` in the sample; declare
    registers."""
    text.add(
        ".reg .pred toeplitz, near, few, p, p1, p2, p3;",
        ".reg .b32 thread, one, other, at_one, at_other, zero, rows_end, distance;",
        ".reg .b32 t, low, span, cell, lowest, e<8>;",
        ".reg .b64 address, wide_t, one_time<2>, other_time, of_cell;",
        f".reg .f32 s<{SCORES}>, line<{2 * GROUPS + 2}>, x<{2 * GROUPS}>, a<2>, c<4>, v<4>, f, g;",
        f".reg .b32 y<{GROUPS}>;",
        "mov.u32 thread, %tid.x;",
        "shr.u32 one, thread, 2;",
        "and.b32 one, one, 7;",
        "shr.u32 t, thread, 5;",
        "mad.lo.s32 one, t, 16, one;",
        "and.b32 other, thread, 3;",
        "shl.b32 other, other, 1;",
        f"add.s32 at_one, one, {text.argument('first_one')};",
        f"add.s32 at_other, other, {text.argument('first_other')};",
        # Always zero, but the compiler cannot know. It keeps ptxas from preparing values ahead of rarely
        # taken branches.
        f"shr.s32 zero, {text.argument('first_other')}, 31;",
    )


def read_record(text: Writer) -> None:
    """Read `few`, `near` and `lowest`; with few edges, p1 to p3 say which edges exist and c1 to c3 hold their
    offsets."""
    text.add(
        f"ld.global.nc.v4.b32 {{lowest, c1, c2, c3}}, [{text.argument('record')}];",
        "shr.u32 t, lowest, 8;",
        "and.b32 lowest, lowest, 255;",
        f"setp.le.u32 few, t, {MOST_EDGES};",
        f"setp.eq.u32 near, t, {NEAR};",
    )
    for edge in range(1, MOST_EDGES + 1):
        text.add(f"setp.ge.and.u32 p{edge}, t, {edge}, few;")


def load_near_buckets(text: Writer, rows_first: bool) -> None:
    """Load the thread's buckets near the diagonal, four to a register: those of its first row in y0.., then
    those of its second."""
    first, second = ("one", "other") if rows_first else ("other", "one")
    text.add(
        f"sub.s32 low, {text.argument(f'first_{first}')}, {text.argument(f'first_{second}')};",
        f"add.s32 t, at_one, {text.argument('start')};",
        *text.point("t", NEAR_BYTES, "near"),
        f"mad.lo.u32 low, other, {GROUPS}, low;",
        "cvt.u64.u32 wide_t, low;",
        "add.s64 address, address, wide_t;",
    )
    size = GROUPS // 2
    for h in (0, 1):
        names = ", ".join(f"y{size * h + n}" for n in range(size))
        text.add(f"ld.global.nc.v{size}.b32 {{{names}}}, [address+{8 * h * NEAR_BYTES}];")


def near_bucket(text: Writer, name: str, k: int, h: int, b: int) -> None:
    """Extract one of the buckets that `load_near_buckets` has loaded."""
    byte = 2 * k + b
    text.add(f"bfe.u32 {name}, y{GROUPS // 2 * h + byte // 4}, {8 * (byte % 4)}, 8;")


def load_offsets(text: Writer) -> None:
    """Load the offsets of the thread's tokens: x0.. for the second dimension, a0 and a1 for the first."""
    text.add(f"mad.lo.s32 t, {text.argument('start')}, 2, at_other;", *text.point("t", 4, "other_offsets"))
    for k in range(GROUPS):
        text.add(f"ld.global.nc.v2.f32 {{x{2 * k}, x{2 * k + 1}}}, [address+{32 * k}];")
    text.add(f"mad.lo.s32 t, {text.argument('start')}, 2, at_one;", *text.point("t", 4, "one_offsets"))
    for h in (0, 1):
        text.add(f"ld.global.nc.f32 a{h}, [address+{32 * h}];")


def find_line(text: Writer, rows_first: bool) -> None:
    """Set `toeplitz` if all rows are history, and `distance` to the distance of the thread's first entry."""
    if rows_first:
        text.add(
            f"add.s32 rows_end, {text.argument('first_one')}, {16 * WARPS};",
            "sub.s32 distance, at_one, at_other;",
        )
    else:
        text.add(
            f"add.s32 rows_end, {text.argument('first_other')}, {8 * GROUPS};",
            "sub.s32 distance, at_other, at_one;",
        )
    length = text.argument("length_one" if rows_first else "length_other")
    text.add(
        f"min.s32 rows_end, rows_end, {length};",
        f"setp.le.s32 toeplitz, rows_end, {text.argument('history_end')};",
    )


def _load_line(text: Writer, rows_first: bool) -> None:
    find_line(text, rows_first)
    text.add(*text.point("distance", 4, "distances"))
    sign = -1 if rows_first else 1
    for u in range(-1, GROUPS):
        for b in (0, 1):
            offset = sign * (32 * u + 4 * b)
            text.add(f"ld.global.nc.f32 line{2 * (u + 1) + b}, [address+{offset}];")


def _add_positions(text: Writer, rows_first: bool) -> None:
    """Compute the scores s0..: products, position parts and v0, the value of the lowest time bucket."""
    for number in range(2 * GROUPS + 2):
        text.add(f"add.f32 line{number}, line{number}, v0;")
    for number, k, h, b in text.entries():
        text.add(
            f"fma.rn.f32 s{number}, {text.score(number)}, {text.argument('alpha')}, "
            f"line{2 * (k - h + 1) + b};"
        )
    text.add("@toeplitz bra.uni PLACED;")

    def correct(number: int, k: int, h: int, b: int) -> None:
        text.add(
            *text.point("distance", 4, "distances"),
            "ld.global.nc.f32 f, [address];",
            "add.f32 f, f, v0;",
            f"sub.f32 f, f, line{2 * (k - h + 1) + b};",  # difference to the value that was added
            f"add.f32 s{number}, s{number}, f;",
        )
        wait_for(text, f"s{number}")

    _each_distance(text, rows_first, correct)
    text.add("PLACED:")


def _each_distance(text: Writer, rows_first: bool, do: Callable[[int, int, int, int], None]) -> None:
    """Compute `distance` for each score, whatever its row, then call `do`. Target groups stand directly
    behind the history."""
    if rows_first:
        for h in (0, 1):
            text.add(f"add.s32 low, at_one, {8 * h};")
            _shift(text, f"e{4 + h}")
    for k in range(GROUPS):
        for b in (0, 1):
            text.add(f"add.s32 cell, at_other, {8 * k + b};", "add.s32 cell, cell, zero;")
            if not rows_first:
                text.add("mov.b32 low, cell;")
                _shift(text, "e4")
            for h in (0, 1):
                text.add(f"add.s32 low, at_one, {8 * h};")
                row, key, shift = ("low", "cell", f"e{4 + h}") if rows_first else ("cell", "low", "e4")
                text.add(
                    f"sub.s32 distance, {row}, {key};",
                    f"setp.lt.s32 p, {key}, {text.argument('history_end')};",
                    f"@p add.s32 distance, distance, {shift};",
                )
                do(4 * k + 2 * h + b, k, h, b)


def _shift(text: Writer, name: str) -> None:
    """Set `name` to the step from row `low` to the position from which its distances to the history count."""
    text.add(
        f"sub.s32 t, low, {text.argument('history_end')};",
        "max.s32 t, t, 0;",
        f"rem.u32 e7, t, {text.argument('group_size')};",
        f"sub.s32 {name}, e7, t;",
    )


def _add_few(text: Writer) -> None:
    text.add("@!few bra.uni MANY;")
    for edge in (1, 2, 3):
        text.add(f"@!p{edge} bra.uni ADDED;")
        for h in (0, 1):
            text.add(f"add.f32 c0, a{h}, c{edge};" if h == 0 else f"add.f32 g, a{h}, c{edge};")
        for number, k, h, b in text.entries():
            text.add(
                f"add.sat.f32 f, {'g' if h else 'c0'}, x{2 * k + b};",
                f"fma.rn.f32 s{number}, f, v{edge}, s{number};",
            )
    text.add("ADDED:")
    for number in range(SCORES):
        text.add(f"mov.f32 ${number}, s{number};")


def _each(text: Writer, do: Callable[[Writer, int], None]) -> None:
    """Compute each score's cell from the times themselves, then call `do`.

    More than 2^31 - 1 seconds count as 2^31 - 1.
    """
    for name, length in (("e4", "length_one"), ("e5", "length_other")):
        text.add(f"sub.s32 {name}, {text.argument(length)}, 1;")
    for h in (0, 1):
        _load_time(text, "one", f"one_time{h}", 8 * h)
    for k in range(GROUPS):
        for b in (0, 1):
            _load_time(text, "other", "other_time", 8 * k + b)
            for h in (0, 1):
                text.add(
                    f"sub.s64 wide_t, one_time{h}, other_time;",
                    "abs.s64 wide_t, wide_t;",
                    "min.s64 wide_t, wide_t, 2147483647;",
                    "cvt.u32.u64 span, wide_t;",
                    "max.u32 t, span, 1;",
                    "cvt.rn.f32.u32 f, t;",
                    "mov.b32 t, f;",
                    "shr.u32 t, t, 21;",
                    f"mad.wide.u32 of_cell, t, {CELL_BYTES}, {text.argument('lookup')};",
                    f"sub.s64 of_cell, of_cell, {FIRST_CELL * CELL_BYTES - CELLS_AT};",
                )
                do(text, 4 * k + 2 * h + b)


def _load_time(text: Writer, name: str, time: str, shift: int) -> None:
    """Load the time of the token `shift` behind the thread's first token, at most the last of the sample."""
    text.add(
        f"add.s32 t, at_{name}, {shift};",
        "add.s32 t, t, zero;",
        f"min.s32 t, t, {'e4' if name == 'one' else 'e5'};",
        f"add.s32 t, t, {text.argument('start')};",
        *text.point("t", 8, f"{name}_times"),
        f"ld.global.nc.s64 {time}, [address];",
    )


def wait_for(text: Writer, name: str) -> None:
    """Make `zero` depend on `name`, so that loads whose address contains `zero` wait: with the loads of all
    scores in flight at once, ptxas runs out of registers."""
    text.add(f"mov.b32 t, {name};", "and.b32 zero, t, zero;")


def _add_from_cell(text: Writer, number: int) -> None:
    text.add(
        "ld.global.nc.v2.b32 {e0, f}, [of_cell];",
        "setp.ge.u32 p, span, e0;",
        "@p ld.global.nc.f32 f, [of_cell+8];",
        f"add.f32 ${number}, s{number}, f;",
    )
    wait_for(text, f"${number}")


def add_to_tables() -> Assembly:
    """Add the gradients of a block's scores [keys, rows] to the sums by distance and by bucket."""
    text = Writer((*ARGUMENTS, *SUMS))
    places(text)
    find_line(text, False)
    read_record(text)
    _declare_sums(text)
    text.add("@!p1 bra.uni NO_EDGE;")
    load_offsets(text)
    text.add("NO_EDGE:")
    text.add("@!near bra.uni FAR;")
    load_near_buckets(text, False)
    text.add("FAR:")
    text.add("@!toeplitz bra.uni ALONE;")
    _sum_line(text)
    text.add("bra.uni PLACED;", "ALONE:")

    def add_alone(number: int, k: int, h: int, b: int) -> None:
        text.add(
            *text.point("distance", 4, "position_sums"),
            f"setp.neu.f32 p, {text.score(number)}, 0f00000000;",
            f"@p red.global.add.f32 [address], {text.score(number)};",
        )

    _each_distance(text, False, add_alone)
    _tree(text, "total", [text.score(number) for number in range(SCORES)])
    text.add("PLACED:")
    text.add("@!near bra.uni NOT_NEAR;")
    for number, k, h, b in text.entries():
        near_bucket(text, "bucket", k, h, b)
        text.add(f"mad.lo.u32 {'at_next' if b else 'at_bucket'}, bucket, {LINE_BYTES}, mine;")
        if b:
            _add_to_two(text, text.score(number - 1), text.score(number))
    text.add("bra.uni END;", "NOT_NEAR:")
    _sum_few(text)
    text.add("MANY:")
    _each(text, _sum_by_cell)
    text.add("END:")
    for number in range(SCORES):
        text.add(f"mov.b32 ${number}, 0;")
    return text.made("=r")


def _declare_sums(text: Writer) -> None:
    text.add(
        ".reg .b32 lane, warp, bucket, mine, at_bucket, at_next;",
        ".reg .f32 total, part, sum, sum0, sum1;",
        "and.b32 lane, thread, 31;",
        "shr.u32 warp, thread, 5;",
        "mov.u32 mine, bucket_sums;",
        f"mad.lo.u32 mine, warp, {WARP_BYTES}, mine;",
        "mad.lo.u32 mine, lane, 4, mine;",
    )


def _sum_few(text: Writer) -> None:
    """Sum by bucket in a block with few edges: split the `total` of the scores at each edge."""
    text.add(
        "@!few bra.uni MANY;", f"mad.lo.u32 at_bucket, lowest, {LINE_BYTES}, mine;", "@!p1 bra.uni LAST;"
    )
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
    text.add("bra.uni END;")


def _tree(text: Writer, name: str, terms: list[str]) -> None:
    """Set `name` to the sum of the terms, in four partial sums that do not wait for one another."""
    parts = ["sum", "sum0", "sum1", "part"]
    for part, term in zip(parts, terms, strict=False):
        text.add(f"mov.f32 {part}, {term};")
    for number, term in enumerate(terms[4:]):
        text.add(f"add.f32 {parts[number % 4]}, {parts[number % 4]}, {term};")
    text.add("add.f32 sum, sum, sum0;", "add.f32 sum1, sum1, part;", f"add.f32 {name}, sum, sum1;")


def _add_to_bucket(text: Writer, name: str) -> None:
    """Add `name` to the thread's own sum at `at_bucket`."""
    text.add("ld.shared.f32 v0, [at_bucket];", f"add.f32 v0, v0, {name};", "st.shared.f32 [at_bucket], v0;")


def _add_to_two(text: Writer, name: str, other: str) -> None:
    """Add `name` at `at_bucket` and `other` at `at_next`; the two places may coincide."""
    text.add(
        "ld.shared.f32 v0, [at_bucket];",
        "ld.shared.f32 v1, [at_next];",
        "setp.eq.u32 p, at_bucket, at_next;",
        f"add.f32 v0, v0, {name};",
        "selp.f32 v1, v0, v1, p;",
        f"add.f32 v1, v1, {other};",
        "st.shared.f32 [at_bucket], v0;",
        "st.shared.f32 [at_next], v1;",
    )


def _sum_by_cell(text: Writer, number: int) -> None:
    text.add(
        "ld.global.nc.b32 e0, [of_cell];",
        "ld.global.nc.b32 e3, [of_cell+12];",
        "setp.ge.u32 p, span, e0;",
        "and.b32 bucket, e3, 65535;",
        "shr.u32 t, e3, 16;",
        "selp.b32 bucket, t, bucket, p;",
        f"mad.lo.u32 at_bucket, bucket, {LINE_BYTES}, mine;",
    )
    _add_to_bucket(text, text.score(number))
    wait_for(text, "v0")


def begin(sums: bool) -> str:
    """Return the text to run before a program's first `add_bias`. It copies the values of the head's time
    buckets to shared memory and, if there will be `sums`, clears the sums of `add_to_tables`. Operands: an
    unused one, and `lookup`."""
    sizes = {"time_values": 4 * MOST_BUCKETS}
    if sums:
        sizes |= {"bucket_sums": WARPS * WARP_BYTES, "lines": WARPS * LINES_BYTES}
    lines = [
        *(
            f".shared .align {SHARED_STEP} .b8 {name}[{-(-size // SHARED_STEP) * SHARED_STEP}];"
            for name, size in sizes.items()
        ),
        "{",
        ".reg .pred p;",
        ".reg .b32 mine, thread;",
        ".reg .b64 address, wide_t;",
        ".reg .f32 f;",
        "mov.u32 thread, %tid.x;",
        f"setp.lt.u32 p, thread, {MOST_BUCKETS};",
        "mul.wide.u32 wide_t, thread, 4;",
        "add.s64 address, wide_t, $2;",
        "@p ld.global.nc.f32 f, [address];",
        "mov.u32 mine, time_values;",
        "mad.lo.u32 mine, thread, 4, mine;",
        "@p st.shared.f32 [mine], f;",
    ]
    for name, size in (("bucket_sums", WARP_BYTES), ("lines", LINES_BYTES)) if sums else ():
        lines += [f"mov.u32 mine, {name};", "mad.lo.u32 mine, thread, 16, mine;"]
        zeros = ", ".join(["0f00000000"] * 4)
        for place in range(0, WARPS * size, 512 * WARPS):
            left = (WARPS * size - place) // 16
            lines.append(f"setp.lt.u32 p, thread, {left};")
            lines.append(f"@p st.shared.v4.f32 [mine+{place}], {{{zeros}}};")
    return "\n".join([*lines, "bar.sync 0;", "mov.b32 $0, 0;", "}"])


def finish_sums() -> str:
    """Return the text to run after a program's last block. It adds the program's sums by bucket to those of
    all programs. Operands: an unused one, a pointer to the head's sums, and their number."""
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
            f"add.u32 lane, thread, {turn};",  # no two threads of a warp use the same bank
            "and.b32 lane, lane, 31;",
            "mad.lo.u32 at, lane, 4, mine;",
        ]
        for warp in range(WARPS):
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


def _row_of_lines(row: int) -> int:
    """Return where in `lines` one of the eight rows of a warp begins, with zeros in between. The starts of
    the four rows that are written at once differ by 8 modulo 32, so that they are in different banks."""
    return 8 + LINE_STEP * row + 8 * (row >= 2) + 8 * (row >= 6)


def _sum_line(text: Writer) -> None:
    """Sum by distance for consecutive history rows; `total` becomes the sum of the thread's diagonals.

    The thread's two rows are added first, shifted by eight columns against each other. The eight rows of a
    warp are then written to shared memory, with zeros before and after each row, and each thread sums its
    diagonals there.
    """
    text.add(
        "mov.u32 span, lines;",
        f"mad.lo.u32 span, warp, {LINES_BYTES}, span;",
        "mad.lo.u32 t, lane, 4, span;",
        "shr.u32 low, lane, 2;",  # the thread's row
        f"mad.lo.u32 cell, low, {4 * LINE_STEP}, span;",
        "setp.ge.u32 p, low, 2;",
        "@p add.u32 cell, cell, 32;",
        "setp.ge.u32 p, low, 6;",
        "@p add.u32 cell, cell, 32;",
        "mad.lo.u32 cell, other, 4, cell;",
        "bar.warp.sync -1;",  # all threads have read what was written last time
    )
    for u in range(-1, GROUPS):
        for b in (0, 1):
            low = text.score(4 * u + b) if u >= 0 else None
            high = text.score(4 * (u + 1) + 2 + b) if u + 1 < GROUPS else None
            if low and high:
                text.add(f"add.f32 sum{b}, {low}, {high};")
            else:
                text.add(f"mov.f32 sum{b}, {low or high};")
        text.add(f"st.shared.v2.f32 [cell+{4 * (_row_of_lines(0) + 8 * (u + 1))}], {{sum0, sum1}};")
    text.add(
        "bar.warp.sync -1;",
        # The distance of the block's first row from the warp's first key, then of the thread's first
        # diagonal.
        f"mad.lo.s32 distance, warp, 16, {text.argument('first_one')};",
        f"sub.s32 distance, {text.argument('first_other')}, distance;",
        "add.s32 distance, distance, lane;",
        *text.point("distance", 4, "position_sums"),
    )
    count = 8 * (GROUPS + 1) + 7
    for first in range(0, count, 32):
        for row in range(8):
            name = "part" if row > 1 else f"sum{row}"
            text.add(f"ld.shared.f32 {name}, [t+{4 * (_row_of_lines(row) + first + row - 7)}];")
            if row > 1:
                text.add(f"add.f32 sum{row % 2}, sum{row % 2}, part;")
        text.add("add.f32 sum, sum0, sum1;")
        if first + 32 > count:  # the remaining threads have read values that do not count
            text.add(f"setp.lt.u32 p, lane, {count - first};", "selp.f32 sum, sum, 0f00000000, p;")
        text.add(
            "mov.f32 total, sum;" if first == 0 else "add.f32 total, total, sum;",
            f"red.global.add.f32 [address+{4 * (first - 15)}], sum;",
        )
