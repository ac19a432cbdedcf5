"""Explains a GPU that ran out of memory: what there was, what took it, and what takes less."""

import re

import torch
from torch import OutOfMemoryError

from recsys.modules.embedding import table_of
from recsys.training.checkpoint import local_bytes
from recsys.training.session import Session
from recsys.training.throughput import peak_memory

_MOST_TABLES = 5
"""Number of tables that the message names, the largest ones."""

_REMEDIES = (
    "To need less: a smaller data.batch_size, with train.accumulate_batches so that a step sees as many "
    "rows; a smaller data.max_history_len; model.precision: BF16; `recompute` of the mixer. If tables are "
    "large: more processes with model.embedding.placement: SHARDED, or fewer rows.",
    "Another --run-dir with train.init_from { path: ... optimizer: true } goes on with other settings.",
)


def explain(session: Session, error: OutOfMemoryError) -> str:
    """Returns the message for a run whose step ran out of memory.

    Args:
        session: the run.
        error: what torch raised; the size of the allocation that failed is taken from its text.
    """
    device, data = session.processes.device, session.pipeline.data
    tokens = session.pipeline.model.max_seq_len
    asked = re.search(r"Tried to allocate ([0-9.]+ \w+)", str(error))
    weights = session.wrapped.state_dict()
    sizes = {table_of(name): local_bytes({name: tensor}) for name, tensor in weights.items()}
    tables = sorted((size, table) for table, size in sizes.items() if table is not None)[::-1]
    named = ", ".join(f"{table} {_gibi(size)}" for size, table in tables[:_MOST_TABLES])
    total = f" of {_gibi(torch.cuda.mem_get_info(device)[1])}" if device.type == "cuda" else ""
    averages = "" if session.average is None else ", averaged weights as much as the weights"
    lines = [
        f"step {session.progress.step + 1}: {device} is out of memory"
        + (f", {asked[1]} more were asked for" if asked else ""),
        f"peak of this process: {_gibi(peak_memory(device))}{total}",
        f"a batch: data.batch_size = {data.batch_size} rows of at most model.max_seq_len = {tokens} tokens, "
        f"so up to {data.batch_size * tokens:,} tokens",
        f"weights {_gibi(local_bytes(weights))}, states of optimizers "
        f"{_gibi(local_bytes(session.optimizer.tensors()))}{averages}; largest tables: {named or 'none'}",
    ]
    return "\n".join([*lines, *_REMEDIES])


def _gibi(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
