"""Writes the starter config that every preparation tool leaves beside its data.

It is composed as text rather than printed from a message so that it can have comments.
"""

import shlex
from pathlib import Path


def write_config(schema: dict, folder: Path, address: Path) -> None:
    """Writes `starter.config` into `folder` for data that will stand at `address`.

    Args:
        schema: the content of schema.json, as `DatasetWriter.write_schema` returns it.
        folder: where the file is written.
        address: where the folder will be in the end.
    """
    text = starter_config(schema, address.as_posix())
    (folder / "starter.config").write_text(text, encoding="utf-8")


def starter_config(schema: dict, address: str) -> str:
    """Returns the text of a Pipeline; a relative `address` counts from where the command runs."""
    ranking = schema["task"] == "ranking"
    parts = [
        _head(schema, address),
        _data(schema, address),
        *(_feature(entry) for entry in schema["features"] if ranking or entry["name"] == "item_id"),
        _ranker(schema) if ranking else _retriever(schema),
        _train(schema),
    ]
    return "\n".join(parts)


def train_command(folder: Path) -> str:
    """Returns the command that trains on the data in `folder`; its run is named after the folder."""
    config, run = shlex.quote(f"{folder.as_posix()}/starter.config"), shlex.quote(f"runs/{folder.name}")
    return f"python -m recsys.train --config {config} --run-dir {run}"


def _head(schema: dict, address: str) -> str:
    lines = [
        f"# A first {schema['task']} model on {address}, to change as you like.",
        "# configs/REFERENCE.md explains every field.",
        f"#   {train_command(Path(address))}",
    ]
    if schema["task"] == "retrieval":
        lines.append("# Other features of items stand in the files too; add them under `features`.")
    return "\n".join(lines) + "\n"


def _data(schema: dict, address: str) -> str:
    lines = ["data {"]
    for split in ("train", "validation", "test"):
        paths = sorted({_glob(file) for file in schema["splits"][split]["files"]})
        lines += [f'  {split} {{ parquet {{ paths: "{address}/{path}" }} }}' for path in paths]
    lines += [
        f'  vocabulary_dir: "{address}/vocabulary"',
        f"  batch_size: {_batch_size(schema)}",
        "  max_history_len: 200",
    ]
    if schema["task"] == "ranking":
        lines.append(f"  max_candidates: {schema['settings']['max_candidates']}")
    lines += [f'  key_columns: "{name}"' for name in ("user_id", "request_id") if name in schema["columns"]]
    return "\n".join([*lines, "}", ""])


def _batch_size(schema: dict) -> int:
    """Chooses the rows per batch: few enough for some twenty steps per epoch where there are few rows."""
    rows = schema["splits"]["train"]["rows"]
    sizes = (128, 64, 32, 16) if schema["task"] == "retrieval" else (64, 32, 16)
    return next((size for size in sizes if rows >= 20 * size), 8)


def _glob(file: str) -> str:
    """Returns the file's path, or its folder for one of several parts."""
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


def _ranker(schema: dict) -> str:
    signed = {name for split in schema["splits"].values() for name in split.get("labels_below_0", ())}
    tasks = "".join(_task(name, kind, name in signed) for name, kind in schema["labels"].items())
    return f"""model {{
  embedding_dim: 32
  ranker {{
    preprocessor {{
      contextual {{
        content {{ hidden: 64 }}
{_action(schema, "        ")}        positional {{
          origin: END
          num_time_buckets: 64 time_scale: SQRT time_unit: 3600
        }}
        dropout: 0.1
      }}
    }}
    mixer {{ hstu {{ num_layers: 2 num_heads: 2 qk_dim: 16 dropout: 0.1 }} }}
    postprocessor {{ layer_norm {{}} }}
    head {{ fusion {{ mlp {{ hidden: 64 }} }} }}
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


def _retriever(schema: dict) -> str:
    return f"""model {{
  embedding_dim: 50
  embedding {{ placement: REPLICATED }}
  retriever {{
    item_feature: "item_id"
    preprocessor {{
      uih {{
{_action(schema, "        ")}        positional {{ origin: START }}
        dropout: 0.2
      }}
    }}
    mixer {{
      hstu {{
        num_layers: 2 num_heads: 1 qk_dim: 50
        activation: UVQK gate: UGN dropout: 0.2
        bias {{}}
        mask {{ contextual_reads_history: false }}
      }}
    }}
    loss {{ softmax {{ temperature: 0.05 full {{}} }} }}
    metrics {{ ndcg {{ k: 10 }} }}
    metrics {{ hit_rate {{ k: 10 }} }}
    metrics {{ hit_rate {{ k: 50 }} }}
    metrics {{ mrr {{}} }}
  }}
}}
"""


def _train(schema: dict) -> str:
    ranking = schema["task"] == "ranking"
    epochs = 2 if ranking else 20
    steps = epochs * -(-schema["splits"]["train"]["rows"] // _batch_size(schema))
    sparse = "  sparse_optimizer { row_wise_adagrad { lr: 0.02 } }\n" if ranking else ""
    beta = "" if ranking else " beta2: 0.98"
    return f"""train {{
  num_epochs: {epochs}
  dense_optimizer {{ adamw {{ lr: 1e-3{beta} }} }}
{sparse}  schedule {{ warmup_steps: {min(100, steps // 10)} cosine {{}} }}
  max_grad_norm: 1
  evaluation {{ patience: {2 if ranking else 5} }}
}}
"""
