"""Declarations of families and mixers: every choice has one, config needs no torch for it, models obey it."""

import subprocess
import sys

import pytest

from recsys import protos as pb
from recsys.config import registry
from recsys.config.declarations import MixerDeclaration, ModelDeclaration, mixer_of, model_of
from recsys.models import build_model, layout_rule
from recsys.modules.cache import caches
from tests.modules.pipelines import CHANNELS, RANKER, RETRIEVER, batch_of, pipeline_of, random_rows

PREPARE = """
import sys
from recsys import config

config.prepare("configs/quickstart.config", read_files=False)
config.prepare("configs/movielens_small_retrieval.config", read_files=False)
print([name for name in ("torch", "recsys.models.components") if name in sys.modules])
"""


def test_a_config_is_prepared_without_torch():
    done = subprocess.run([sys.executable, "-c", PREPARE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("choice", "base"), [(pb.Model, ModelDeclaration), (pb.Mixer, MixerDeclaration)])
def test_every_family_and_mixer_has_a_declaration(choice, base):
    (oneof,) = choice.DESCRIPTOR.oneofs
    for field in oneof.fields:
        assert issubclass(registry.declaration(field.message_type._concrete_class), base), field.name


def test_a_config_without_a_model_has_no_tasks_and_no_mixer():
    model = model_of(pb.Pipeline())
    assert (model.kind, list(model.tasks), model.losses(), model.metrics()) == ("", [], [], [])
    assert mixer_of(pb.Pipeline()) is None


def test_two_declarations_of_one_message_are_refused(monkeypatch):
    monkeypatch.setattr(registry, "_DECLARATIONS", dict(registry._DECLARATIONS))
    registry.declaration(pb.Ranker)
    with pytest.raises(ValueError, match="recsys.Ranker is declared twice: recsys.models"):
        registry.declare(pb.Ranker)(type("Another", (ModelDeclaration,), {}))


@pytest.mark.parametrize(
    "texts", [(RANKER,), (RANKER, CHANNELS), (RETRIEVER,)], ids=["ranker", "channels", "retriever"]
)
def test_models_do_what_their_family_declares(texts):
    pipeline = pipeline_of(*texts)
    declared, model = model_of(pipeline), build_model(pipeline).eval()
    batch = batch_of(pipeline, random_rows(pipeline, [(3, 2), (2, 1)]))
    assert layout_rule(pipeline).targets == declared.has_targets
    scores = model.score(batch)
    searched = declared.item_feature is not None
    assert len(scores) == len(batch.uih_lengths if searched else batch.candidate_timestamps)
    assert searched or scores.shape[1] == len(declared.outputs)
    assert declared.reads_candidates("predict") is not searched
    assert caches(model.mixer) == mixer_of(pipeline).keeps_cache
