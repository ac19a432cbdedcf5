"""Reads protobuf text format and finds every mistake in one pass; writes it with remarks after lines.

Protobuf's own parser stops at the first mistake and knows neither paths nor lines. `parser` walks the text
along the descriptors, skips the parts that it cannot use and goes on. Text that it accepts has the meaning
that protobuf's parser gives it (a test compares them). It accepts less: decimal numbers only, names and no
numbers for enum values, no `nan` and `inf`, no `\\x` escapes in strings.
"""

from recsys.config.textproto.overrides import override
from recsys.config.textproto.parser import Parsed, parse
from recsys.config.textproto.scalars import did_you_mean, enum_names
from recsys.config.textproto.writer import write

__all__ = ["Parsed", "did_you_mean", "enum_names", "override", "parse", "write"]
