"""Writes the starter config that every preparation tool leaves beside its data.

The config is composed as text, rather than printed from a message, so that it can have comments.
"""

import shlex
from pathlib import Path

from recsys.prepare.starter_settings import SMALL_LOG, StarterSettings, choose_settings

OFF = "#: "
"""Prefix of each line of the config that is switched off."""


def write_config(schema: dict, folder: Path, address: Path) -> None:
    """Writes `starter.config` into `folder` for data that will stand at `address`.

    Args:
        schema: the content of schema.json, as `DatasetWriter.write_schema` returns it.
        folder: folder to write to.
        address: final path of the folder.
    """
    text = starter_config(schema, address.as_posix())
    (folder / "starter.config").write_text(text, encoding="utf-8")


def starter_config(schema: dict, address: str) -> str:
    """Returns the text of a Pipeline; a relative `address` starts from where the command runs."""
    ranking, settings = schema["task"] == "ranking", choose_settings(schema)
    item_features = [] if ranking else schema["features"][1:]
    parts = [
        _head(schema, address, settings),
        _data(schema, address, settings),
        *(_feature(entry) for entry in schema["features"] if ranking or entry["name"] == "item_id"),
        *([_item_features(item_features)] if item_features else []),
        _ranker(schema, settings) if ranking else _retriever(schema, settings),
        _train(schema, settings),
    ]
    return "\n".join(parts)


def train_command(folder: Path) -> str:
    """Returns the command that trains on the data in `folder`; its run is named after the folder."""
    config, run = shlex.quote(f"{folder.as_posix()}/starter.config"), shlex.quote(f"runs/{folder.name}")
    return f"python -m recsys.train --config {config} --run-dir {run}"


def _head(schema: dict, address: str, settings: StarterSettings) -> str:
    command = train_command(Path(address))
    lines = [
        f"# A first {schema['task']} model on {address}, to change as you like.",
        "# configs/REFERENCE.md explains every field.",
        f"#   {command}",
        f"# Sizes and rates fit {settings.rows:,} training rows: see recsys/prepare/starter_settings.py.",
    ]
    if settings.blend:
        lines += [
            "# With so few users, counting which items follow each other is hard to beat; training shows",
            "# it beside each evaluation (co-occurrence). The blend of both is mostly ahead of either.",
            "# This measures the blend, and with --output DIR recommends:",
            f"#   python -m recsys.blend{command[command.index(' --run-dir') :]}",
        ]
    return "\n".join(lines) + "\n"


def _data(schema: dict, address: str, settings: StarterSettings) -> str:
    lines = ["data {"]
    for split in ("train", "validation", "test"):
        paths = sorted({_glob(file) for file in schema["splits"][split]["files"]})
        lines += [f'  {split} {{ parquet {{ paths: "{address}/{path}" }} }}' for path in paths]
    lines.append(f'  vocabulary_dir: "{address}/vocabulary"')
    if schema["task"] == "retrieval" and len(schema["features"]) > 1:
        lines.append(f'  {OFF}item_file: "{address}/items.parquet"')
    lines += [
        f"  batch_size: {settings.batch_size}",
        f"  max_history_len: {settings.max_history_len}",
    ]
    if schema["task"] == "ranking":
        lines.append(f"  max_candidates: {schema['settings']['max_candidates']}")
    lines += [f'  key_columns: "{name}"' for name in ("user_id", "request_id") if name in schema["columns"]]
    return "\n".join([*lines, "}", ""])


def _item_features(entries: list[dict]) -> str:
    """Returns the item features of a two-tower model, switched off, with a comment about their purpose."""
    about = (
        f"# A two-tower model also knows what items are: remove each `{OFF.strip()}`. It may pay where many\n"
        "# items are new; on MovieLens it did not (experiments/2026-11-22-two-tower).\n"
    )
    text = "".join(_feature({**entry, "sides": ["ITEM"]}) for entry in entries)
    return about + "".join(f"{OFF}{line}\n" for line in text.splitlines())


def _glob(file: str) -> str:
    """Returns the path of a file, or of its folder if the file is one of several parts."""
    return file.split("/")[0] if "/" in file else file


def _feature(entry: dict) -> str:
    sides = ", ".join(entry["sides"])
    head = f'features {{\n  name: "{entry["name"]}"\n  sides: [{sides}]\n'
    if entry["kind"] == "number":
        statistics = entry["statistics"]
        wide = statistics["std"] > 2 * abs(statistics["mean"]) or statistics["std"] > 100
        mean, std = ("log1p_mean", "log1p_std") if wide else ("mean", "std")
        log = " log1p: true" if wide else ""
        scale = f"mean: {statistics[mean]:.6g} std: {statistics[std]:.6g}{log}"
        return head + f"  numeric {{ normalize {{ {scale} }} }}\n}}\n"
    many = " multi_valued: true pooling: MEAN" if entry["multi_valued"] else ""
    return head + f"  id {{ vocabulary {{}}{many} }}\n}}\n"


def _ranker(schema: dict, settings: StarterSettings) -> str:
    signed = {name for split in schema["splits"].values() for name in split.get("labels_below_0", ())}
    tasks = "".join(_task(name, kind, name in signed) for name, kind in schema["labels"].items())
    width, dropout = settings.embedding_dim, settings.dropout
    return f"""model {{
  embedding_dim: {width}
  ranker {{
    preprocessor {{
      contextual {{
        content {{ hidden: {2 * width} }}
{_action(schema, "        ")}        positional {{
          origin: END
          num_time_buckets: 64 time_scale: SQRT time_unit: 3600
        }}
        dropout: {dropout}
      }}
    }}
    mixer {{
      hstu {{ num_layers: {settings.num_layers} num_heads: 2 qk_dim: {width // 2} dropout: {dropout} }}
    }}
    postprocessor {{ layer_norm {{}} }}
    head {{ fusion {{ mlp {{ hidden: {2 * width} }} }} }}
{tasks}  }}
}}
"""


def _action(schema: dict, indent: str) -> str:
    bits = [f'bits {{ name: "{action["name"]}" bit: {action["bit"]} }}' for action in schema["actions"]]
    if schema["watch_time"]:
        bits += [f"watch_time_thresholds: {seconds}" for seconds in (3, 10, 30)]
    if not bits:
        return ""
    return "".join([f"{indent}action {{\n", *(f"{indent}  {bit}\n" for bit in bits), f"{indent}}}\n"])


def _task(name: str, kind: str, signed: bool) -> str:
    if kind == "binary":
        loss, metrics = (
            "binary_cross_entropy {}",
            "metrics { auc {} } metrics { gauc {} } metrics { normalized_entropy {} }",
        )
    else:
        loss = "mean_squared_error {}" if signed else "mean_squared_error { log1p: true }"
        metrics = "metrics { mae {} } metrics { mse {} }"
    return f'    tasks {{ name: "{name}" loss {{ {loss} }} {metrics} }}\n'


def _retriever(schema: dict, settings: StarterSettings) -> str:
    width, dropout = settings.embedding_dim, settings.dropout
    mixer = _small_mixer(settings) if settings.rows < SMALL_LOG else _large_mixer(settings)
    tower = f"    {OFF}item_encoder {{ mlp {{ hidden: {2 * width} }} residual: true }}\n"
    return f"""model {{
  embedding_dim: {width}
  embedding {{ placement: REPLICATED }}
  retriever {{
    item_feature: "item_id"
{tower if len(schema["features"]) > 1 else ""}    preprocessor {{
      uih {{
{_action(schema, "        ")}        positional {{ origin: START }}
        dropout: {dropout}
      }}
    }}
{mixer}    loss {{ softmax {{ temperature: 0.05 full {{}} }} }}
    metrics {{ ndcg {{ k: 10 }} }}
    metrics {{ hit_rate {{ k: 10 }} }}
    metrics {{ hit_rate {{ k: 50 }} }}
    metrics {{ mrr {{}} }}
  }}
}}
"""


def _small_mixer(settings: StarterSettings) -> str:
    return f"""    mixer {{
      sasrec {{
        num_layers: {settings.num_layers} num_heads: 2 dropout: {settings.dropout}
        mask {{ contextual_reads_history: false }}
      }}
    }}
"""


def _large_mixer(settings: StarterSettings) -> str:
    return f"""    mixer {{
      hstu {{
        num_layers: {settings.num_layers} num_heads: 2 qk_dim: {settings.embedding_dim // 2}
        activation: UVQK gate: UGN dropout: {settings.dropout}
        bias {{}}
        mask {{ contextual_reads_history: false }}
      }}
    }}
"""


def _train(schema: dict, settings: StarterSettings) -> str:
    ranking = schema["task"] == "ranking"
    sparse = "  sparse_optimizer { row_wise_adagrad { lr: 0.02 } }\n" if ranking else ""
    beta = "" if ranking else " beta2: 0.98"
    return f"""train {{
  num_epochs: {settings.num_epochs}
  dense_optimizer {{ adamw {{ lr: {settings.lr:g}{beta} }} }}
{sparse}  schedule {{ warmup_steps: {settings.warmup_steps} cosine {{}} }}
  max_grad_norm: 1
  evaluation {{ every_steps: {settings.every_steps} patience: {settings.patience} }}
}}
"""
