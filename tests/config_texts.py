"""Small valid configs that tests of the config language start from, and the findings about invalid ones."""

import pytest

from recsys import config
from recsys.errors import ConfigError

RANKER = """
# A comment.
data {
  train { parquet { paths: "train.parquet" } }
  validation { parquet { paths: ["a.parquet", 'b.parquet'] } }
  vocabulary_dir: "vocabulary"
  batch_size: 16
  max_history_len: 20
  max_candidates: 5
  key_columns: "user_id"
}
features { name: "item_id" sides: [HISTORY, CANDIDATE] id { vocabulary {} } }
features { name: "author" sides: HISTORY sides: CANDIDATE id { hash { num_buckets: 100 } embedding_dim: 8 } }
features { name: "city" sides: USER id { hash { num_buckets: 10 } } }
features { name: "age" sides: USER numeric { bucketize { boundaries: [18, 30.5, 1e2] } } }
model {
  ranker {
    preprocessor { contextual { action { bits { name: "click" bit: 0 } } positional {} } }
    mixer { hstu { num_heads: 2 qk_dim: 16 bias {} } }
    postprocessor { layer_norm {} }
    head { fusion {} }
    tasks { name: "click" loss { binary_cross_entropy {} } metrics { calibration {} } metrics { auc {} } }
    tasks { name: "time" loss { mean_squared_error { log1p: true } } weight: .5, metrics < mae <> >; }
  }
  embedding_dim: 32
}
train { num_steps: 100 schedule { warmup_steps: 5 cosine {} } }
"""
RETRIEVER = """
data {
  train { synthetic {} }
  test { synthetic { seed: 1 } }
  vocabulary_dir: "vocabulary/"
  max_history_len: 50
}
features { name: "item_id" sides: [HISTORY, CANDIDATE] id { vocabulary { size: 10 } table: "movies" } }
model {
  retriever {
    item_feature: "item_id"
    preprocessor { uih { positional {} } }
    mixer { sasrec { num_heads: 4 } }
    loss { softmax {} }
    metrics { ndcg { k: 5 } }
    metrics { mrr {} }
  }
}
train { num_epochs: 2 }
"""


def findings(load, *arguments) -> list[str]:
    """The findings of the ConfigError that `load(*arguments)` raises."""
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    return caught.value.findings


def load(text: str, overrides: list[str], tmp_path) -> config.Loaded:
    """A text with overrides, as if it were read from x.config."""
    path = tmp_path / "x.config"
    path.write_text(text, encoding="utf-8")
    return config.read(path, overrides)
