"""Chooses the sizes and rates of a starter config from the size of the data.

The rules come from experiments/2026-11-24-starter, where they were tuned on validation rows:

- Batches: a power of two with 16 to 32 of them in an epoch of retrieval (150 to 300 of ranking). Few rows
  need small batches, or there are too few steps.
- Length: 50 epochs of retrieval, which are 800 to 1,600 steps; ranking overfits after the second epoch.
- Rate: 5e-3 on small logs, where 1e-3 had learned half as much when the run ended; less for large batches, as
  the ready configs measured on ML-1M and Amazon Beauty.
- Dropout: half of the numbers where an item has few events to learn from, down to a fifth.
- Evaluation: some 20 times in a run of retrieval, which ends when a quarter of it brings no gain; 4 times in
  one of ranking.
"""

from dataclasses import dataclass

MOST_TOKENS = 2**16
"""Most events in an average batch; longer histories get smaller batches."""

LONGEST_HISTORY = 200
"""Most events of a history that are read, the newest ones. Shorter histories cost nothing, and every event
trains."""

SMALL_LOG = 5_000
"""Number of users below which counting is hard to beat: the model is small, and the config offers the
blend."""


@dataclass(frozen=True)
class StarterSettings:
    """The settings that depend on the size of the data, with their names in `train` and `data`.

    Attributes:
        rows: number of training rows.
        steps: optimizer steps of the whole run in one process.
        batch_size: rows per batch.
        max_history_len: number of newest events that a history keeps.
        num_epochs: passes over the training rows.
        lr: learning rate of the dense optimizer.
        warmup_steps: number of warm-up steps.
        dropout: dropout of tokens and layers.
        every_steps: steps between two evaluations.
        patience: number of evaluations without a gain after which training stops.
        embedding_dim: width of the tokens.
        num_layers: number of layers of the mixer.
        blend: True if the config offers the blend with co-occurrence.
    """

    rows: int
    steps: int
    batch_size: int
    max_history_len: int
    num_epochs: int
    lr: float
    warmup_steps: int
    dropout: float
    every_steps: int
    patience: int
    embedding_dim: int
    num_layers: int
    blend: bool


def choose_settings(schema: dict) -> StarterSettings:
    """Chooses the settings for a data set.

    Args:
        schema: the content of schema.json.
    """
    return (_ranking if schema["task"] == "ranking" else _retrieval)(schema)


def _retrieval(schema: dict) -> StarterSettings:
    rows, events = (schema["splits"]["train"][name] for name in ("rows", "history_events"))
    length = min(schema["settings"].get("max_history") or LONGEST_HISTORY, LONGEST_HISTORY)
    mean_length = max(1.0, min(events / max(rows, 1), length))
    batch = _power_of_two(min(rows / 16, MOST_TOKENS / mean_length), 8, 1024)
    epochs = 50
    steps = epochs * -(-rows // batch)
    per_item = events / max(schema["features"][0]["vocabulary_size"], 1)
    return StarterSettings(
        rows=rows,
        steps=steps,
        batch_size=batch,
        max_history_len=length,
        num_epochs=epochs,
        lr=5e-3 if rows < SMALL_LOG else 4e-3 if batch <= 512 else 2e-3,
        warmup_steps=min(100, steps // 10),
        dropout=0.5 if per_item < 50 else 0.3 if per_item < 150 else 0.2,
        every_steps=max(1, steps // 20),
        patience=5,
        embedding_dim=64,
        num_layers=1 if rows < SMALL_LOG else 2,
        blend=rows < SMALL_LOG,
    )


def _ranking(schema: dict) -> StarterSettings:
    rows = schema["splits"]["train"]["rows"]
    length = min(schema["settings"].get("max_history") or LONGEST_HISTORY, LONGEST_HISTORY)
    batch = _power_of_two(rows / 150, 8, 256)
    epochs = 2
    steps = epochs * -(-rows // batch)
    return StarterSettings(
        rows=rows,
        steps=steps,
        batch_size=batch,
        max_history_len=length,
        num_epochs=epochs,
        lr=1e-3,
        warmup_steps=min(100, steps // 10),
        dropout=0.1,
        every_steps=max(1, steps // 4),
        patience=3,
        embedding_dim=32,
        num_layers=2,
        blend=False,
    )


def _power_of_two(value: float, least: int, most: int) -> int:
    """Returns the largest power of two not above `value`, bounded by the powers of two `least` and `most`."""
    power = least
    while power * 2 <= min(value, most):
        power *= 2
    return power
