"""`evaluate` repeats training's metrics for the same weights; a dry run shows all and leaves no file."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys import cli
from recsys import export as export_command
from recsys import train as train_command
from tests.integration.runs import CONFIG, evaluate, flags, records, train


def test_evaluate_repeats_what_training_measured(tmp_path, capsys, caplog):
    rows = pq.read_table("tests/data/kuairand/validation.parquet").slice(0, 400)
    pq.write_table(rows, tmp_path / "rows.parquet")
    short = ("train.num_steps=4", "train.schedule.warmup_steps=1", "train.evaluation.every_steps=2")
    short += (f"data.validation.parquet.paths=['{tmp_path / 'rows.parquet'}']",)
    assert train(tmp_path, *short, "train.evaluation.max_batches=") == 0
    assert f"  python -m recsys.evaluate --run-dir {tmp_path} --split validation" in caplog.messages
    assert f"  python -m recsys.predict --run-dir {tmp_path} --input FILES" in caplog.messages
    measured = {step: record["metrics"] for step, record in records(tmp_path, "evaluation").items()}
    assert measured[2] != measured[4]
    lengths = pc.list_value_length(rows["uih_timestamps"])
    cut = {
        "left_out": 0,
        "cut_histories": pc.sum(pc.greater(lengths, 20)).as_py(),
        "cut_candidates": 0,
        "repeated_targets": 0,
        "protocol": {},
    }
    for step in (2, 4):
        arguments = ("--run-dir", str(tmp_path), "--split", "validation", "--checkpoint", str(step))
        assert evaluate(*arguments) == 0
        written = json.loads((tmp_path / "validation_metrics.json").read_text())
        expected = {"checkpoint": f"step-{step:08d}", "metrics": measured[step], **cut}
        assert written == expected
        assert f"{measured[step]['is_click/auc']:.5f}" in capsys.readouterr().out
    best = max(measured, key=lambda step: measured[step]["is_click/auc"])
    assert evaluate("--run-dir", str(tmp_path), "--split", "validation") == 0
    written = json.loads((tmp_path / "validation_metrics.json").read_text())
    assert written == {"checkpoint": f"step-{best:08d}", "metrics": measured[best], **cut}


def test_rows_left_out_are_counted_wherever_one_looks(tmp_path, caplog):
    table = pq.read_table("tests/data/kuairand/validation.parquet").slice(0, 200)
    labels = table["candidate_is_click"].to_pylist()
    bad = [row for row, events in enumerate(labels) if row % 5 == 0 and events]
    for row in bad:
        labels[row][0] = None
    place = table.schema.get_field_index("candidate_is_click")
    kind = table.schema.field(place).type
    pq.write_table(
        table.set_column(place, "candidate_is_click", pa.array(labels, kind)), tmp_path / "x.parquet"
    )
    paths = [f"data.{split}.parquet.paths=['{tmp_path / 'x.parquet'}']" for split in ("train", "validation")]
    lengths = [len(events) for events in table["uih_timestamps"].to_pylist()]
    cut = sum(length > 20 for row, length in enumerate(lengths) if row not in bad)
    assert len(bad) == 40 and cut > 10

    one_epoch = ("train.num_steps=", "train.num_epochs=1", "train.log_every_steps=5", "data.num_workers=1")
    one_epoch += ("train.evaluation.max_batches=", "train.schedule.warmup_steps=0")
    assert train(tmp_path / "run", *paths, *one_epoch, "data.bad_rows.policy=SKIP") == 0
    said = f"{len(bad)} of 200 were left out (null {len(bad)})"
    assert f"train rows of epoch 0: {said}" in caplog.messages
    assert f"validation rows: {said}" in caplog.messages
    trained = records(tmp_path / "run").values()
    assert sum(record["left_out"] for record in trained) == len(bad)
    assert sum(record["cut_histories"] for record in trained) == cut
    evaluated = records(tmp_path / "run", "evaluation").values()
    assert {(record["left_out"], record["cut_histories"]) for record in evaluated} == {(len(bad), cut)}
    assert evaluate("--run-dir", str(tmp_path / "run"), "--split", "validation") == 0
    written = json.loads((tmp_path / "run" / "validation_metrics.json").read_text())
    assert (written["left_out"], written["cut_histories"], written["cut_candidates"]) == (len(bad), cut, 0)


def test_a_kernel_that_cannot_run_is_a_finding_of_every_command(tmp_path, capsys):
    triton = "model.ranker.mixer.hstu.backend=triton"
    assert train(tmp_path / "run", triton) == 2
    assert train(tmp_path / "run", "train.num_steps=2", "train.schedule.warmup_steps=0") == 0
    flags_of_run = ["--run-dir", str(tmp_path / "run"), "--set", triton]
    assert evaluate(*flags_of_run, "--split", "validation") == 2
    assert cli.main("export", export_command.run, flags_of_run, add_flags=export_command.add_flags) == 2
    finding = "model.ranker.mixer.hstu.backend: backend 'triton' of hstu_attention cannot run this: it needs"
    assert capsys.readouterr().err.count(finding) == 3


def test_weights_are_not_used_with_an_edited_config(tmp_path, capsys):
    """Every weight fits, and the scores would be others."""
    assert train(tmp_path, "train.num_steps=2", "train.schedule.warmup_steps=0") == 0
    edited = tmp_path / "edited.config"
    text = Path(CONFIG).read_text(encoding="utf-8")
    edited.write_text(text.replace("time_unit: 3600", "time_unit: 60"), encoding="utf-8")
    for given in (
        ["--config", str(edited)],
        ["--set", "model.ranker.preprocessor.contextual.positional.time_unit=60"],
    ):
        flags_of_run = ["--run-dir", str(tmp_path), *given]
        assert evaluate(*flags_of_run, "--split", "validation") == 2
        assert cli.main("export", export_command.run, flags_of_run, add_flags=export_command.add_flags) == 2
    said = capsys.readouterr().err
    assert said.count("positional.time_unit: 3600.0 in") == 4
    assert not (tmp_path / "validation_metrics.json").exists()
    assert evaluate("--run-dir", str(tmp_path), "--split", "validation", "--set", "data.batch_size=7") == 0


def test_a_run_that_met_a_bad_row_goes_on_without_it(tmp_path, caplog):
    """As its error advises, and to the same weights as a run that never read the row."""
    table = pq.read_table("tests/data/kuairand/train.parquet").slice(0, 128)
    times = table["request_time"].to_pylist()
    times[20] = None
    place = table.schema.get_field_index("request_time")
    broken = table.set_column(place, table.schema.field(place), pa.array(times, pa.int64()))
    # The order of this seed comes to the first row group when training is under way.
    pq.write_table(broken, tmp_path / "x.parquet", row_group_size=64)
    paths = [f"data.train.parquet.paths=['{tmp_path / 'x.parquet'}']"]
    paths += ["data.shuffle_row_groups=1", "data.num_lanes=1", "train.num_steps=8"]
    assert train(tmp_path / "run", *paths) == 3
    assert "data.bad_rows { policy: SKIP }" in caplog.text
    assert records(tmp_path / "run"), "the bad row came before the first step"
    skip = "data.bad_rows.policy=SKIP"
    assert train(tmp_path / "run", *paths, skip) == 0
    assert train(tmp_path / "whole", *paths, skip) == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_a_two_tower_run_goes_on_with_the_same_items_only(tmp_path, caplog):
    items = tmp_path / "items.parquet"
    known = pq.read_table("tests/data/movielens/items.parquet")
    pq.write_table(known, items)
    few = []
    for split, count in (("train", 128), ("validation", 32)):
        path = tmp_path / f"{split}.parquet"
        pq.write_table(pq.read_table(f"tests/data/movielens/{split}.parquet").slice(0, count), path)
        few.append(f'data.{split}={{parquet {{paths: "{path}"}}}}')

    def train_to(step: int, path: Path) -> int:
        chosen = ["train.num_epochs=", f"train.num_steps={step}", "train.schedule.warmup_steps=0", *few]
        chosen += [f"data.item_file='{path}'", "data.num_workers=0", "train.evaluation.max_batches=1"]
        chosen += ["data.batch_size=8", "data.eval_batch_size=16"]
        given = ["--config", "configs/movielens_small_two_tower.config", "--run-dir", str(tmp_path / "run")]
        for command in chosen:
            given += ["--set", command]
        return train_command.main(given)

    assert train_to(1, items) == 0
    moved = items.rename(tmp_path / "moved.parquet")
    assert train_to(2, moved) == 0
    years = pc.add(known["year"], 1)
    pq.write_table(known.set_column(known.schema.get_field_index("year"), "year", years), moved)
    assert train_to(3, moved) == 3
    assert "data.item_file changed since the run was saved" in caplog.text


def test_what_is_not_there_is_named(tmp_path, capsys, caplog):
    assert evaluate(*flags(tmp_path)) == 2
    assert "data.test: absent" in capsys.readouterr().err
    assert evaluate(*flags(tmp_path), "--split", "validation") == 1
    assert "there is no undamaged checkpoint" in caplog.text


def test_a_dry_run_shows_a_sample_and_sizes_and_leaves_nothing(tmp_path, capsys):
    folder = tmp_path / "run"
    assert train_command.main([*flags(folder), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "position  kind        item" in shown
    assert "contextual  hour=" in shown
    assert "sequence: " in shown
    assert "to the head: " in shown
    sizes = shown.split("parameters: ")[1].split("\n")[0]
    total, *parts = (int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", sizes))
    assert len(parts) == 4
    assert sum(parts) == total
    asked = "(cpu, float32, model.ranker.mixer.hstu.backend: auto)"
    assert f"kernel of hstu_attention: reference {asked}\n" in shown
    assert "  triton     no: it needs CUDA tensors" in shown
    assert not folder.exists()
