"""Columns of a work list: the meaning of each int64 number of an item, which describes one tile.

A tile is a run of consecutive rows (or keys) of one sample. It visits blocks of keys (or rows), counted from
the start of the sample, in three ascending, disjoint runs: [0, COUNT_A), [START_B, START_B + COUNT_B) and
[START_C, START_C + COUNT_C). With these blocks numbered consecutively, UNMASKED_COUNT of them, from number
UNMASKED_AT on, need no mask; the first of those is block UNMASKED_START.

`item` has the same constants for kernels, and functions that read the numbers.
"""

START = 0
"""Index of the sample's first row in [T]."""
LENGTH = 1
"""Number of tokens of the sample; 0 for an item that only pads the list."""
HISTORY_END = 2
"""Position of the sample's first target, counted from the sample's start."""
FIRST = 3
"""Position of the tile's first token in the sample; negative if a tile counted from the sample's end begins
before the sample (see `row_work`)."""
COUNT_A = 4
START_B = 5
COUNT_B = 6
START_C = 7
COUNT_C = 8
UNMASKED_AT = 9
UNMASKED_START = 10
UNMASKED_COUNT = 11
NUM_COLUMNS = 12

# With a cache, COUNT_A to UNMASKED_COUNT describe blocks of cached keys, and HISTORY_END counts those keys.

NEW = 8
"""Columns COUNT_A + NEW to UNMASKED_COUNT + NEW describe the blocks of new keys in the same way."""
CACHE_START = 20
"""Index of the sample's first cached row."""
CACHE_LENGTH = 21
"""Number of cached rows of the sample."""
PART = 22
"""Number of the item's part of the cached keys; blocks of cached keys count from the start of the part."""
PART_FIRST = 23
"""Position of the part's first token in the sample."""
PART_LENGTH = 24
"""Number of tokens in the part."""
NUM_CACHED_COLUMNS = 25
