"""Checks the rules of packages."""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config import features, fields, registry
from recsys.config.checks.walk import Finding
from recsys.config.declarations import MixerDeclaration, mixer_of, model_of

INT4_WIDTH = 4
"""FBGEMM quantizes rows of a multiple of this number of columns to INT4."""


def caching_mixers() -> list[str]:
    """Returns the names of the mixers that can score with a cache."""
    declared = {
        fields.name_of(field): registry.declaration(fields.type_of(field))
        for field in fields.alternatives(pb.Mixer)
    }
    return [name for name, mixer in declared.items() if (mixer or MixerDeclaration).keeps_cache]


def _cached_scoring(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.export.cached_scoring:
        yield from _uncacheable(pipeline, "export.cached_scoring")
    if pipeline.predict.HasField("user_store"):
        yield from _uncacheable(pipeline, "predict.user_store")
        memory = pipeline.predict.user_store
        if not memory.host_mib and not memory.device_mib:
            problem = "host_mib and device_mib are 0, so no user fits; give one of them, or remove the store"
            yield Finding("predict.user_store", problem)
        if memory.HasField("disk") and not memory.disk.folder:
            yield Finding("predict.user_store.disk.folder", "is missing: name a folder, or remove disk")


def _uncacheable(pipeline: pb.Pipeline, path: str) -> Iterator[Finding]:
    """Yields a finding if the model cannot score with a cache, which the setting of this path needs."""
    model, mixer = model_of(pipeline), mixer_of(pipeline)
    if not model.kind:
        return
    if not model.reads_candidates("predict"):
        problem = (
            f"a {model.kind} scores no candidates of a row, so there is nothing to cache; remove this setting"
        )
        yield Finding(path, problem)
    elif not model.keeps_cache:
        yield Finding(path, f"a {model.kind} cannot score with a cache; remove this setting")
    elif mixer is not None and not mixer.keeps_cache:
        name = mixer.path.removeprefix(f"{model.path}.")
        problem = f"{name} cannot score with a cache; remove this setting, or use"
        yield Finding(path, f"{problem} {' or '.join(caching_mixers())}")


def _int4_width(pipeline: pb.Pipeline) -> Iterator[Finding]:
    if pipeline.export.tables.dtype != pb.ExportTables.INT4 or not model_of(pipeline).kind:
        return
    try:
        tables = features.mapped_tables(pipeline)
    except ValueError:
        # The item feature of the model is missing, which another rule reports.
        return
    for table in tables:
        if table.width % INT4_WIDTH:
            problem = f"INT4 needs tables whose width is a multiple of {INT4_WIDTH}, and {table.name} has"
            yield Finding("export.tables.dtype", f"{problem} {table.width} columns; use INT8")


RULES = (_cached_scoring, _int4_width)
