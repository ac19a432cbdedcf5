"""`--set`: what an override sets, and what its mistakes are called."""

import pytest
from google.protobuf import text_format

from recsys import config
from recsys import protos as pb
from tests.config_texts import RANKER, findings


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.num_steps=7", "train { num_steps: 7 }"),
        ("features[1].id.embedding_dim=9", "features { } features { id { embedding_dim: 9 } }"),
        ("data.train.parquet.paths=['a','b']", "data { train { parquet { paths: 'a' paths: 'b' } } }"),
        ("data.train.parquet.paths=a,b", "data { train { parquet { paths: 'a,b' } } }"),
        ("data.vocabulary_dir=some/where=1", "data { vocabulary_dir: 'some/where=1' }"),
        ("data.vocabulary_dir='x y'", "data { vocabulary_dir: 'x y' }"),
        ("data.vocabulary_dir = x y ", "data { vocabulary_dir: 'x y' }"),
        ("data.vocabulary_dir=' x'", "data { vocabulary_dir: ' x' }"),
        (
            "train.schedule={warmup_steps: 5 cosine {}}",
            "train { schedule { warmup_steps: 5 cosine {} } }",
        ),
        ("model.precision=BF16", "model { precision: BF16 }"),
        ("features[0].id.multi_valued=true", "features { id { multi_valued: true } } features {}"),
        ("features[0].sides=[USER, HISTORY]", "features { sides: [USER, HISTORY] } features {}"),
    ],
)
def test_sets_one_field(write, override, expected):
    start = "features {} features {}"
    wanted = text_format.Parse(expected, pb.Pipeline())
    if not wanted.features:
        wanted.features.add()
        wanted.features.add()
    assert config.load(write(start), [override]) == wanted


def test_replaces_and_clears(write):
    name = write(
        "train { num_epochs: 3 schedule { warmup_steps: 9 linear {} } } data { key_columns: ['a', 'b'] }"
    )
    overrides = [
        "train.num_steps=5",
        "train.schedule={cosine{}}",
        "data.key_columns=['c']",
    ]
    wanted = "train { num_steps: 5 schedule { cosine {} } } data { key_columns: 'c' }"
    assert config.load(name, overrides) == text_format.Parse(wanted, pb.Pipeline())


def test_the_last_one_counts(write):
    assert config.load(write(""), ["train.seed=4", "train.seed=5"]).train.seed == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.num_step=1", "train.num_step: no such field. Did you mean num_steps?"),
        ("train.num_steps", "expected path=value"),
        ("train.num_steps=many", "train.num_steps: expected a whole number (int64), found many"),
        ("train.num_steps=1 2", "unexpected '2'"),
        ("train.num_steps.x=1", "train.num_steps: has no fields of its own"),
        ("train[0].seed=1", "train[0]: not repeated; leave [0] out"),
        ("features.name=a", "features: repeated; say which one, for example features[0]"),
        ("features[2].name=a", "features[2]: there are 1, counted from 0"),
        ("features[0]={}", "features[0]: one element cannot be replaced"),
        ("features[-1].name=a", "'features[-1]' is not a field name"),
        ("=1", "'' is not a field name"),
        (
            "train.schedule={warmup_step: 1}",
            "train.schedule.warmup_step: no such field. Did you mean warmup_steps?",
        ),
        ("train.schedule={", "'{' is never closed"),
        ("train.schedule=5", "train.schedule: expected Schedule in braces, found '5'"),
        ("model.ranker.mixer.sasrec.dropout=0", "sasrec: hstu is chosen; replace it first"),
        ("train.max_grad_norm=inf", "inf is not allowed"),
        ("data.vocabulary_dir=\udcff", "a string that is not valid UTF-8"),
    ],
)
def test_mistakes_name_the_flag(write, override, message):
    name = write("features {} model { ranker { mixer { hstu {} } } }")
    (finding,) = findings(config.load, name, [override])
    assert finding.startswith(f"--set {override}: ")
    assert message in finding


def test_findings_of_checks_name_the_flag_too(write):
    findings_of_config = findings(config.prepare, write(RANKER), ["data.batch_size=0"])
    assert "--set data.batch_size=0: data.batch_size: 0 is given; it must be 1 or more" in findings_of_config
