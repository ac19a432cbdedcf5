"""Matches names of parameters against the patterns by which a config selects some of them.

In a pattern `*` stands for any text. Configs use the names that `Model.named_parameters()` gives; the
training step and checkpoints prefix them with `MODEL`.
"""

import difflib
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

MODEL = "model."
"""Prefix of the names of weights in a checkpoint; the rest is the name in `Model.state_dict()`."""


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Returns whether a name matches any of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def without_match(patterns: Sequence[str], names: Collection[str], path: str) -> list[str]:
    """Returns a finding for each pattern that matches none of the names.

    Args:
        patterns: patterns from a config.
        names: the names to choose from.
        path: path of the list of patterns in the config, for the findings.
    """
    return [
        f"{path}[{place}]: {pattern!r} matches none of the {len(names)} names. {_suggestion(pattern, names)}"
        for place, pattern in enumerate(patterns)
        if not any(fnmatchcase(name, pattern) for name in names)
    ]


def _suggestion(pattern: str, names: Collection[str]) -> str:
    spans = {words: text for name in names for words, text in _spans(name)}
    if near := difflib.get_close_matches(pattern.strip("*."), list(spans), n=1):
        return f"Did you mean {spans[near[0]]}?"
    return f"They begin with {', '.join(sorted({name.split('.')[0] for name in names})) or 'nothing'}."


def _spans(name: str) -> Iterator[tuple[str, str]]:
    """Yields each run of consecutive words in a name, with the pattern that matches the run in its place."""
    words = name.split(".")
    for first in range(len(words)):
        for last in range(first + 1, len(words) + 1):
            run = ".".join(words[first:last])
            yield run, ("*." if first else "") + run + (".*" if last < len(words) else "")
