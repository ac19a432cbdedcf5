"""Rules of packages."""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config.checks.walk import Finding

CACHING_MIXERS = ("hstu", "mixture")
"""Mixers that can score with a cache."""


def _cached_scoring(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if not pipeline.export.cached_scoring:
        return
    path = "export.cached_scoring"
    kind = pipeline.model.WhichOneof("model")
    if kind not in (None, "ranker"):
        yield Finding(path, f"a {kind} scores no candidates of a row, so there is nothing to cache; drop it")
    mixer = pipeline.model.ranker.mixer.WhichOneof("mixer")
    if kind == "ranker" and mixer not in (None, *CACHING_MIXERS):
        what = f"mixer.{mixer} keeps no cache; drop it, or use {' or '.join(CACHING_MIXERS)}"
        yield Finding(path, what)


RULES = (_cached_scoring,)
