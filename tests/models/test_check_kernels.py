"""A config names the attention kernels that its model calls, and one that cannot run is refused."""

import pytest

from recsys import config
from recsys import protos as pb
from recsys.data.loader import Loader
from recsys.errors import ConfigError
from recsys.models import build_model, layout_rule
from recsys.models.check_kernels import _uses, check_kernels, describe_kernels
from recsys.ops.hstu_attention import OP as HSTU
from recsys.ops.softmax_attention import OP as SOFTMAX
from tests.config_texts import RANKER, RETRIEVER


@pytest.fixture
def resolved(tmp_path):
    def make(text: str, *overrides: str) -> pb.Pipeline:
        (tmp_path / "x.config").write_text(text, encoding="utf-8")
        return config.prepare(tmp_path / "x.config", overrides, read_files=False).pipeline

    return make


HSTU_PATH = "model.ranker.mixer.hstu"


def test_a_backend_that_the_device_cannot_run_is_a_finding(resolved):
    pipeline = resolved(RANKER, f"{HSTU_PATH}.backend=triton")
    with pytest.raises(ConfigError) as caught:
        check_kernels(pipeline, "cpu")
    (finding,) = caught.value.findings
    assert finding.startswith(f"{HSTU_PATH}.backend: backend 'triton' of hstu_attention cannot run this: ")
    assert "CUDA" in finding and finding.endswith("backend='auto' takes one that can")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_what_runs_passes(resolved, backend):
    check_kernels(resolved(RANKER, f"{HSTU_PATH}.backend={backend}"), "cpu")
    check_kernels(resolved(RETRIEVER), "cpu")


def test_every_group_of_layers_with_its_own_mask_is_asked_about(resolved):
    groups = "[{num_layers: 2}, {num_layers: 1 mask {window: 4}}, {num_layers: 3}]"
    actual = list(_uses(resolved(RANKER, f"{HSTU_PATH}.layer_groups={groups}"), "cpu"))
    assert [use.facts.mask.window for use in actual] == [None, 4]


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
@pytest.mark.parametrize(
    ("file", "op"),
    [("tests/integration/tiny.config", HSTU), ("configs/movielens_small_retrieval.config", HSTU)]
    + [("configs/ml_1m_sasrec.config", SOFTMAX)],
)
def test_the_facts_are_those_of_the_models_calls(file, op, precision, monkeypatch):
    movielens = ("data.vocabulary_dir=tests/data/movielens/vocabulary", "data.num_workers=0", "data.test=")
    movielens += tuple(
        f"data.{split}.parquet.paths=['tests/data/movielens/{split}.parquet']"
        for split in ("train", "validation")
    )
    overrides = [f"model.precision={precision}", *(() if "tiny" in file else movielens)]
    pipeline = config.prepare(file, overrides).pipeline
    model = build_model(pipeline)
    batch = next(Loader.open(pipeline, "train", layout_rule(pipeline)).epoch())
    asked = []
    monkeypatch.setattr(op, "select", lambda facts, backend: asked.append((facts, backend)) or reference)
    reference = type(op).select(op, next(_uses(pipeline, "cpu")).facts)
    model(batch)
    expected = [(item.facts, item.backend) for item in _uses(pipeline, "cpu")]
    assert asked and list(dict.fromkeys(asked)) == expected


def test_the_description_says_what_was_chosen_and_why_nothing_else(resolved):
    (said,) = describe_kernels(resolved(RANKER), "cpu")
    head, hopper, triton, reference = said.splitlines()
    assert head == f"kernel of hstu_attention: reference (cpu, float32, {HSTU_PATH}.backend: auto)"
    assert hopper.split()[:2] == ["sm90", "no:"] and "CUDA" in hopper
    assert triton.split()[:2] == ["triton", "no:"] and "CUDA" in triton
    assert reference.split() == ["reference", "usable"]
    (said,) = describe_kernels(resolved(RETRIEVER, "model.precision=BF16"), "cpu")
    assert said.startswith("kernel of softmax_attention: reference (cpu, bfloat16, model.retriever.mixer.")
