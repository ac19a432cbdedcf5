"""Reads what the client of Weights & Biases wrote offline: its messages, in a log like that of LevelDB."""

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple

BLOCK, HEAD = 32768, struct.Struct("<IHB")
FILE_HEAD = 7
"""Bytes before the first record: ":W&B", a magic number and a version."""


class Recorded(NamedTuple):
    """A run as it would be uploaded."""

    run_id: str
    project: str
    config: dict[str, Any]
    rows: dict[int, dict[str, Any]]
    summary: dict[str, Any]
    files: list[str]
    exit_code: int


def read(path: Path) -> Recorded:
    """Reads a `run-<id>.wandb`."""
    from wandb.proto.wandb_internal_pb2 import Record

    run_id = project = ""
    config: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {}
    summary: dict[str, Any] = {}
    files: list[str] = []
    exit_code = -1
    for content in _records(path.read_bytes()):
        record = Record.FromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id, project = record.run.run_id, record.run.project
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            step = int(items.pop("_step", record.history.step.num))
            rows[step] = {key: value for key, value in items.items() if not key.startswith("_")}
        elif kind == "summary":
            summary |= {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.summary.update
            }
        elif kind == "files":
            files += [item.path for item in record.files.files]
        elif kind == "exit":
            exit_code = record.exit.exit_code
    return Recorded(run_id, project, config, rows, summary, files, exit_code)


def _records(content: bytes) -> list[bytes]:
    """Joins the fragments of each record: 1 is a whole one, 2 the first, 3 a middle and 4 the last."""
    assert content[:4] == b":W&B"
    place, records, begun = FILE_HEAD, [], b""
    while place + HEAD.size <= len(content):
        left = BLOCK - place % BLOCK
        if left < HEAD.size:
            place += left
            continue
        _, length, kind = HEAD.unpack_from(content, place)
        place += HEAD.size
        begun = content[place : place + length] if kind in (1, 2) else begun + content[place : place + length]
        place += length
        if kind in (1, 4):
            records.append(begun)
    return records
