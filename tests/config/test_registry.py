"""From messages to classes; every choice that a config can make has a class."""

import importlib

import pytest

from recsys import protos as pb
from recsys.config import registry


@pytest.fixture
def classes(monkeypatch):
    """The registered classes, none at first."""
    importlib.import_module(registry.COMPONENTS)  # else a miss would register its classes here
    monkeypatch.setattr(registry, "_CLASSES", {})
    return registry._CLASSES


def test_pick_gives_the_class_and_its_message(classes):
    class L2NormPostprocessor:
        pass

    registry.register(pb.L2NormPostprocessor)(L2NormPostprocessor)
    actual = registry.pick(pb.Postprocessor(l2_norm=pb.L2NormPostprocessor(eps=0.5)))
    assert actual.cls is L2NormPostprocessor
    assert actual.config == pb.L2NormPostprocessor(eps=0.5)


def test_nothing_chosen_names_the_choices():
    with pytest.raises(ValueError, match="Postprocessor: nothing is set; choose one of l2_norm, layer_norm"):
        registry.pick(pb.Postprocessor())


def test_nothing_registered_names_what_is(classes):
    with pytest.raises(ValueError, match="no class is registered for recsys.AdamW; known: none"):
        registry.pick(pb.DenseOptimizer(adamw=pb.AdamW()))


def test_a_class_bears_its_messages_name(classes):
    class Other:
        pass

    with pytest.raises(ValueError, match="Other is registered for recsys.Mrr"):
        registry.register(pb.Mrr)(Other)


def test_one_class_a_message(classes):
    def make(module):
        return type("Mrr", (), {"__module__": module})

    registry.register(pb.Mrr)(make("a"))
    registry.register(pb.Mrr)(make("a"))  # a module that is imported again
    with pytest.raises(ValueError, match="recsys.Mrr is registered twice: a and b"):
        registry.register(pb.Mrr)(make("b"))


@pytest.mark.parametrize(
    ("choice", "package"),
    [
        (pb.Model, "recsys.models"),
        (pb.ItemIndex, "recsys.inference.search"),
        (pb.Mixer, "recsys.modules.mixers"),
        (pb.Preprocessor, "recsys.modules.preprocessors"),
        (pb.Postprocessor, "recsys.modules.postprocessors"),
        (pb.Head, "recsys.modules.heads"),
        (pb.Loss, "recsys.modules.losses"),
        (pb.Metric, "recsys.modules.metrics"),
        (pb.Source, "recsys.data.sources"),
        (pb.DenseOptimizer, "recsys.training.dense_optimizers"),
        (pb.SparseOptimizer, "recsys.training.sparse_optimizers"),
        (pb.Schedule, "recsys.training.schedules"),
        (pb.Hook, "recsys.training.hooks"),
    ],
    ids=lambda value: value.DESCRIPTOR.name if hasattr(value, "DESCRIPTOR") else "",
)
def test_every_choice_of_a_config_has_a_class(choice, package):
    importlib.import_module(package)
    actual = registry.registered(choice)
    (oneof,) = choice.DESCRIPTOR.oneofs
    assert list(actual) == [field.name for field in oneof.fields]
    for name, component in actual.items():
        assert component.cls.__name__ == component.config.DESCRIPTOR.name, name
        assert component.cls.__module__.startswith(package), name
