"""Ranges, needs, backends and kinds of the rules are those of the protos and of the classes."""

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from recsys import config
from recsys import protos as pb
from recsys.config import checks
from recsys.config.checks import choices, values
from recsys.config.checks import export as export_rules
from recsys.config.registry import registered
from recsys.modules import losses, metrics, mixers  # noqa: F401  they register themselves
from recsys.modules.cache import CachingMixer
from recsys.modules.mixer_declarations import BACKENDS, LinearDeclaration
from recsys.ops.hstu_attention import OP
from tests.config_texts import RANKER, RETRIEVER, load


def all_messages():
    results, waiting = {}, [pb.Pipeline.DESCRIPTOR]
    while waiting:
        message = waiting.pop()
        if message.full_name not in results:
            results[message.full_name] = message
            waiting += [field.message_type for field in message.fields if field.message_type]
    return list(results.values())


NUMBERS = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_DOUBLE)


def test_every_number_of_the_protos_has_a_range_and_every_range_a_number():
    numbers = {
        (message.name, field.name)
        for message in all_messages()
        for field in message.fields
        if field.cpp_type in NUMBERS
    }
    ranges = {(message.DESCRIPTOR.name, name) for message, names in values.RANGES.items() for name in names}
    assert ranges == numbers


def test_every_default_is_in_its_range():
    for message, ranges in values.RANGES.items():
        for name, (holds, words) in ranges.items():
            field = message.DESCRIPTOR.fields_by_name[name]
            if field.has_default_value:
                assert holds(field.default_value), f"{message.DESCRIPTOR.name}.{name} must be {words}"


def test_required_fields_exist():
    for message, names in values.REQUIRED.items():
        assert set(names) <= set(message.DESCRIPTOR.fields_by_name)


def test_backends_are_those_of_the_op():
    assert set(BACKENDS) == {"auto", *OP.backends}


def test_only_rankers_with_a_mixer_that_keeps_one_score_with_a_cache(tmp_path, monkeypatch):
    asked = "export.cached_scoring=true"
    assert config.check(load(RANKER, [asked], tmp_path).pipeline) == []
    (finding,) = config.check(load(RETRIEVER, [asked], tmp_path).pipeline)
    assert finding.endswith(
        "a retriever scores no candidates of a row, so there is nothing to cache; remove this setting"
    )
    hybrid = "model.ranker.mixer={hybrid {mixers {linear {qk_dim: 8}} mixers {sasrec {}}}}"
    assert config.check(load(RANKER, [asked, hybrid], tmp_path).pipeline) == []
    monkeypatch.setattr(LinearDeclaration, "keeps_cache", False)
    (finding,) = config.check(load(RANKER, [asked, hybrid], tmp_path).pipeline)
    assert "mixer.hybrid cannot score with a cache; remove this setting, or use hstu or sasrec" in finding


def test_a_store_of_users_needs_memory(tmp_path):
    (finding,) = config.check(
        load(RANKER, ["predict.user_store={host_mib: 0 device_mib: 0}"], tmp_path).pipeline
    )
    assert "predict.user_store: host_mib and device_mib are 0, so no user fits" in finding
    (finding,) = config.check(load(RANKER, ["predict.user_store={disk {}}"], tmp_path).pipeline)
    assert "predict.user_store.disk.folder: is missing: name a folder" in finding
    assert config.check(load(RANKER, ["predict.user_store={host_mib: 0}"], tmp_path).pipeline) == []


def test_caching_mixers_are_those_that_can():
    can = {name for name, actual in registered(pb.Mixer).items() if issubclass(actual.cls, CachingMixer)}
    assert can == set(export_rules.caching_mixers())


def test_kinds_of_losses_are_those_of_their_classes():
    kinds = {name: [component.cls.kind] for name, component in registered(pb.Loss).items()}
    assert {field.name: choices.labels(field) for field in pb.Loss.DESCRIPTOR.fields} == kinds


@pytest.mark.parametrize("part", ["", "binary_cross_entropy {}", "mean_squared_error {}"])
def test_the_kind_of_a_pairwise_loss_is_that_of_its_pointwise_part(part):
    loss = text_format.Parse(f"pairwise {{ {part} }}", pb.Loss())
    assert checks.loss_kind(loss) == losses.PairwiseLoss(loss.pairwise).kind
    assert checks.loss_kind(pb.Loss()) is None


def test_names_and_directions_of_metrics_are_those_of_their_classes():
    pipeline = pb.Pipeline()
    built = {}
    for name, component in registered(pb.Metric).items():
        metric = component.cls(component.config)
        built[metric.name] = metric.higher_is_better is not None
        getattr(pipeline.model.retriever.metrics.add(), name).SetInParent()
    assert {metric.name: metric.directed for metric in checks.metric_names(pipeline)} == built


@pytest.mark.parametrize("choice", [pb.Loss, pb.Metric])
def test_the_schema_says_of_every_loss_and_metric_which_labels_it_is_for(choice):
    for field in choice.DESCRIPTOR.fields:
        assert choices.labels(field), f"protos: {field.full_name} has no (labels)"
        assert set(choices.labels(field)) <= {"binary", "regression", "retrieval"}


def test_the_schema_says_of_every_preprocessor_which_model_it_is_for():
    for field in pb.Preprocessor.DESCRIPTOR.fields:
        assert choices.models(field), f"protos: {field.full_name} has no (models)"
        assert set(choices.models(field)) <= {model.name for model in pb.Model.DESCRIPTOR.oneofs[0].fields}
