"""The columns of a work list: what the int64 numbers of one item say about its tile.

A tile is some consecutive rows (or keys) of one sample. It visits blocks of keys (or rows), counted from the
start of the sample, in three ascending, disjoint runs: [0, COUNT_A), [START_B, START_B + COUNT_B) and
[START_C, START_C + COUNT_C). Number these blocks one after the other: the UNMASKED_COUNT blocks from number
UNMASKED_AT on need no mask, and the first of them is block UNMASKED_START.

`item` has the same numbers for kernels, and the functions that read them.
"""

START = 0
"""The sample's first row in [T]."""
LENGTH = 1
"""Tokens of the sample; 0 for an item that only fills the list up."""
HISTORY_END = 2
"""The sample's first target, counted from its start."""
FIRST = 3
"""The tile's first token; below 0 where tiles are counted from the end of the sample (see `row_work`)."""
COUNT_A = 4
START_B = 5
COUNT_B = 6
START_C = 7
COUNT_C = 8
UNMASKED_AT = 9
UNMASKED_START = 10
UNMASKED_COUNT = 11
NUM_COLUMNS = 12

# With a cache, COUNT_A to UNMASKED_COUNT are about blocks of cached keys, and HISTORY_END counts them, too.

NEW = 8
"""The columns COUNT_A + NEW to UNMASKED_COUNT + NEW say the same about blocks of new keys."""
CACHE_START = 20
"""The sample's first cached row."""
CACHE_LENGTH = 21
"""The sample's number of cached rows."""
PART = 22
"""The number of the part of cached keys that the item is about; blocks of them count from its start."""
PART_FIRST = 23
"""The part's first token in the sample."""
PART_LENGTH = 24
"""Tokens of the part."""
NUM_CACHED_COLUMNS = 25
