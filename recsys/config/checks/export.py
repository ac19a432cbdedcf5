"""Checks the rules of packages."""

from collections.abc import Iterator

from recsys import protos as pb
from recsys.config import fields, registry
from recsys.config.checks.walk import Finding
from recsys.config.declarations import MixerDeclaration, mixer_of, model_of


def caching_mixers() -> list[str]:
    """Returns the names of the mixers that can score with a cache."""
    declared = {
        fields.name_of(field): registry.declaration(fields.type_of(field))
        for field in fields.alternatives(pb.Mixer)
    }
    return [name for name, mixer in declared.items() if (mixer or MixerDeclaration).keeps_cache]


def _cached_scoring(pipeline: pb.Pipeline) -> Iterator[Finding]:
    model, path = model_of(pipeline), "export.cached_scoring"
    if not pipeline.export.cached_scoring or not model.kind:
        return
    mixer = mixer_of(pipeline)
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


RULES = (_cached_scoring,)
