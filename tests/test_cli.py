"""Flags, output, logging and exit codes of the shared command line."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recsys import cli, config, environment, errors, logs
from tests.config_texts import RANKER, RETRIEVER

HASHED = RANKER.replace("vocabulary {}", "hash { num_buckets: 50 }")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the runnable x.config, which needs no files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv(cli.LOG_VARIABLE, raising=False)
    (tmp_path / "x.config").write_text(HASHED, encoding="utf-8")
    return tmp_path


@pytest.fixture
def calls():
    return []


@pytest.fixture
def run(calls):
    def train(call: cli.Call) -> None:
        """Train a model."""
        calls.append(call)

    return train


def test_run_gets_the_resolved_config(folder, run, calls):
    assert cli.main("train", run, ["--config", "x.config", "--set", "train.seed=7"]) == 0
    (call,) = calls
    assert call.pipeline.train.seed == 7
    assert call.pipeline.model.max_seq_len == 27
    assert call.ready.origins["model.max_seq_len"].startswith("contextual tokens")
    assert call.run_dir.as_posix() == "runs/x"
    assert not call.dry_run


def test_validate(folder, run, calls, capsys):
    assert cli.main("train", run, ["--config", "x.config", "--validate"]) == 0
    assert capsys.readouterr().out == "ok\n"
    flags = ["--config", "x.config", "--validate", "--set", "data.batch_size=0", "--set", "train.seed=-1"]
    assert cli.main("train", run, flags) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "--set data.batch_size=0: data.batch_size: 0 is given; it must be 1 or more",
        "--set train.seed=-1: train.seed: -1 is given; it must be 0 or more",
    ]
    assert calls == []
    assert not (folder / "runs").exists()


def test_validate_looks_at_the_columns_of_the_files(run, calls, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[1])
    flags = ["--config", "configs/quickstart.config", "--validate"]
    assert cli.main("train", run, flags) == 0
    assert capsys.readouterr().out == "ok\n"
    assert cli.main("train", run, [*flags, "--set", "model.ranker.tasks[0].label=candidate_clik"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "train.parquet: no column candidate_clik. Did you mean candidate_is_click?" in shown.err
    assert calls == []


def test_validate_shows_warnings(folder, run, capsys):
    assert cli.main("train", run, ["--config", "x.config", "--validate", "--set", "data.validation="]) == 0
    shown = capsys.readouterr()
    assert "data.validation: not set: the model will not be evaluated" in shown.err
    assert shown.out == "ok\n"


def test_warnings_of_a_config_are_shown_once_for_all_processes(folder, run, monkeypatch, capsys):
    arguments = ["--config", "x.config", "--set", "train.schedule.warmup_steps=1000000"]
    shown = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main("train", run, arguments) == 0
        shown.append(capsys.readouterr().err.count("learning rate is still rising"))
    assert shown == [1, 0]


def test_torchs_own_log_is_quiet_before_torch_is_there(folder, run, monkeypatch):
    """A command imports it later."""
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    assert cli.main("train", run, ["--config", "x.config", "--validate"]) == 0
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    assert cli.main("train", run, ["--config", "x.config", "--validate"]) == 0
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"


def test_a_printed_config_is_a_config(folder, run, calls, capsys):
    assert cli.main("train", run, ["--config", "x.config", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "max_seq_len: 27  # contextual tokens" in printed
    (folder / "y.config").write_text(printed, encoding="utf-8")
    for name in ("x.config", "y.config"):
        assert cli.main("train", run, ["--config", name]) == 0
    assert calls[0].pipeline == calls[1].pipeline


def test_the_config_of_a_run_is_found_in_its_folder(folder, run, calls):
    (folder / "there").mkdir()
    (folder / "x.config").rename(folder / "there" / config.FILE_NAME)
    assert cli.main("export", run, ["--run-dir", "there"]) == 0
    assert calls[0].run_dir.as_posix() == "there"
    assert calls[0].pipeline.model.embedding_dim == 32


def test_commands_that_can_do_without_a_config(folder, run, calls, capsys):
    assert cli.main("train", run, []) == 2
    assert "--config: not given" in capsys.readouterr().err
    assert cli.main("predict", run, ["--set", "train.seed=3"], needs_config=False) == 2
    assert cli.main("predict", run, [], needs_config=False) == 0
    with pytest.raises(errors.ConfigError, match="no config"):
        _ = calls[0].pipeline


def test_the_config_of_a_package_is_read_without_its_files(folder, calls, run):
    text = RETRIEVER.replace("size: 10", 'size: 10 file: "gone.parquet"')
    (folder / "package").mkdir()
    (folder / "package" / config.FILE_NAME).write_text(text, encoding="utf-8")

    def where(flags):
        return folder / "package" / config.FILE_NAME

    assert cli.main("predict", run, ["--set", "predict.top_k=3"], config_file=where) == 0
    assert calls[0].pipeline.predict.top_k == 3
    assert calls[0].run_dir.as_posix() == "."
    assert not (folder / "log.txt").exists()
    assert cli.main("predict", run, ["--run-dir", "there"], config_file=where) == 0
    assert calls[1].run_dir.as_posix() == "there"
    assert cli.main("evaluate", run, ["--config", "x.config"], config_file=lambda flags: None) == 0
    assert calls[2].run_dir.as_posix() == "runs/x"


def test_a_command_with_its_own_config_offers_none(folder, run, capsys):
    def help_of(**settings) -> str:
        with pytest.raises(SystemExit):
            cli.main("predict", run, ["--help"], **settings)
        return " ".join(capsys.readouterr().out.split())

    assert "--config FILE" in help_of() and "default: runs/<name of the config>" in help_of()
    # A command such as `evaluate` reads the config of a package, or else the one that the flags name.
    assert "--config FILE" in help_of(config_file=lambda flags: None)
    shown = help_of(config_file=lambda flags: folder / "x.config", takes_config=False)
    assert "--config" not in shown and "<name of the config>" not in shown
    assert "--run-dir DIR" in shown


def test_own_flags(folder, run, calls):
    flags = ["--config", "x.config", "--rows", "3"]
    assert cli.main("train", run, flags, add_flags=lambda p: p.add_argument("--rows", type=int)) == 0
    assert calls[0].flags.rows == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--confi", "x.config"], "unrecognized arguments: --confi x.config. Did you mean --config? "),
        (["--run_dir=a"], "unrecognized arguments: --run_dir=a. Did you mean --run-dir? "),
        (["--zzz"], "unrecognized arguments: --zzz. "),
        (["x.config"], "unrecognized arguments: x.config. "),
        (["--log-level", "loud"], "argument --log-level: invalid choice: 'loud'"),
    ],
)
def test_unknown_flags_are_errors_of_one_line(folder, run, flags, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main("train", run, flags)
    assert stopped.value.code == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"python -m recsys.train: {message}")
    assert shown.endswith("--help lists the flags.")


def test_a_file_that_is_no_config_is_not_a_wall_of_findings(folder, run, capsys):
    (folder / "log.csv").write_text("user,item,time\n" + "u,i,1\n" * 500, encoding="utf-8")
    assert cli.main("train", run, ["--config", "log.csv"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == cli.MOST_FINDINGS + 1
    assert shown[-1].startswith("... and ") and shown[-1].endswith(" more")


def test_a_run_folder_that_is_not_there_is_not_made(folder, run, calls, capsys):
    assert cli.main("evaluate", run, ["--run-dir", "typo"]) == 2
    assert "--run-dir typo: holds no run" in capsys.readouterr().err
    assert cli.main("evaluate", run, ["--config", "x.config", "--run-dir", "typo"]) == 0
    assert len(calls) == 1
    assert not (folder / "typo").exists()


def test_warnings_are_shown_when_a_config_is_given_not_when_its_run_is_used(folder, run, capsys):
    without = HASHED.replace("num_steps: 100", "num_steps: 5")
    (folder / "x.config").write_text(without, encoding="utf-8")
    assert cli.main("train", run, ["--config", "x.config", "--run-dir", "here"]) == 0
    assert "train.schedule.warmup_steps: 5 is given and the run has 5 steps" in capsys.readouterr().err
    (folder / "here" / config.FILE_NAME).write_text(without, encoding="utf-8")
    assert cli.main("export", run, ["--run-dir", "here"]) == 0
    assert capsys.readouterr().err == ""


def test_version_and_help(folder, run, capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as stopped:
            cli.main("train", run, [flag])
        assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for name in ("recsys", "torch", "torchrec", "fbgemm-gpu"):
        assert f"{name} {environment.versions()[name]}\n" in shown
    assert "Train a model." in shown


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.RecsysError("disk"), 1),
        (errors.ConfigError(["a: b", "c: d"]), 2),
        (errors.DataError("part-3.parquet, row 1182: broken"), 3),
        (errors.NonFiniteLossError("step 7"), 4),
        (errors.InstallationError("no compiler"), 5),
        (ModuleNotFoundError("No module named 'pyarrow'"), 5),
        (OSError(28, "No space left on device", "runs/x/log.txt"), 1),
        (KeyboardInterrupt(), 130),
        (errors.Terminated("saved at step 9"), 143),
        (errors.Terminated("saved at step 9", signal.SIGINT), 130),
    ],
)
def test_exit_codes(folder, capsys, error, code):
    def run(call):
        raise error

    assert cli.main("train", run, ["--config", "x.config"]) == code
    shown = capsys.readouterr().err
    assert str(error) in shown
    assert "Traceback" not in shown


def test_an_error_of_the_system_says_what_to_do(folder, capsys):
    def run(call):
        (folder / "run").mkdir()
        (folder / "run").read_text()

    assert cli.main("train", run, ["--config", "x.config"]) == 1
    assert f"Is a directory: '{folder}/run'; move the folder out of the way" in capsys.readouterr().err


def test_the_log_shows_bytes_of_names_that_are_no_text(folder, capfd, monkeypatch):
    def run(call):
        raise errors.DataError(f"{os.fsdecode(bytes([0xFF]))}.parquet: no such file")

    (folder / "here").mkdir()
    # As Python opens it; the one of pytest refuses such names, and so does pytest-xdist in its own log.
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(sys, "stderr", open(2, "w", errors="backslashreplace", closefd=False))
    assert cli.main("train", run, ["--config", "x.config", "--run-dir", "here"]) == 3
    sys.stderr.flush()
    assert "Logging error" not in capfd.readouterr().err
    assert r"\udcff.parquet: no such file" in (folder / "here" / "log.txt").read_text(encoding="utf-8")


def test_other_errors_keep_their_traceback(folder):
    def run(call):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.main("train", run, ["--config", "x.config"])


def test_the_log_goes_to_stderr_and_the_run_folder(folder, capsys):
    def run(call):
        logging.getLogger("recsys.somewhere").info("step 1")
        logging.getLogger("recsys.somewhere").debug("hidden")
        logging.getLogger("recsys.somewhere").info("under the bar", extra=logs.FILE_ONLY)
        raise errors.DataError("row 3")

    before = logging.getLogger().handlers[:]
    (folder / "here").mkdir()
    for _ in range(2):
        cli.main("train", run, ["--config", "x.config", "--run-dir", "here"])
    shown = capsys.readouterr().err
    assert shown.count("step 1") == shown.count("row 3") == 2
    assert "hidden" not in shown and "under the bar" not in shown
    text = (folder / "here" / "log.txt").read_text(encoding="utf-8")
    assert text.count("step 1") == text.count("row 3") == text.count("under the bar") == 2
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize(
    ("made", "error", "kept"),
    [
        ([".lock"], errors.DataError, False),
        ([".lock", "config.resolved"], errors.DataError, True),
        ([], ZeroDivisionError, True),
    ],
)
def test_an_error_before_a_run_begins_leaves_no_folder(folder, made, error, kept):
    def run(call):
        for name in made:
            (call.run_dir / name).touch()
        raise error("row 3")

    with pytest.raises(ZeroDivisionError) if error is ZeroDivisionError else contextlib.nullcontext():
        assert cli.main("train", run, ["--config", "x.config", "--run-dir", "here"]) == 3
    assert (folder / "here" / "log.txt").exists() == (folder / "here").exists() == kept


def test_a_log_file_on_a_full_disk_ends_and_the_command_goes_on(folder, capsys):
    def run(call):
        for step in range(3):
            logging.getLogger("recsys.somewhere").info("step %d", step)

    (folder / "here").mkdir()
    (folder / "here" / "log.txt").symlink_to("/dev/full")
    assert cli.main("train", run, ["--config", "x.config", "--run-dir", "here"]) == 0
    shown = capsys.readouterr().err
    assert [f"step {step}" in shown for step in range(3)] == [True] * 3
    assert shown.count("log.txt ends here, it cannot be written: [Errno 28] No space left") == 1
    assert "Traceback" not in shown and "Logging error" not in shown


def test_levels(folder, monkeypatch, capsys):
    def run(call):
        logging.getLogger("recsys.somewhere").debug("details")

    for flags, variable, expected in (
        ([], "", 0),
        (["--log-level", "debug"], "", 1),
        ([], "DEBUG", 1),
        (["--log-level", "info"], "loud", 0),
    ):
        monkeypatch.setenv(cli.LOG_VARIABLE, variable)
        assert cli.main("train", run, ["--config", "x.config", *flags]) == 0
        assert capsys.readouterr().err.count("details") == expected


def test_findings_are_shown_by_the_first_process_and_told_to_torchrun(folder, run, monkeypatch, capsys):
    wrong = ["--config", "x.config", "--set", "data.batch_size=0"]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    for rank, shown in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert cli.main("train", run, wrong) == 2
        assert capsys.readouterr().err.count("data.batch_size: 0 is given") == shown
        told = json.loads((folder / "error.json").read_text(encoding="utf-8"))["message"]["message"]
        assert "data.batch_size: 0 is given" in told
        (folder / "error.json").unlink()


@pytest.mark.parametrize("error", [errors.DataError("row 3 is broken"), ZeroDivisionError("row 3 is broken")])
def test_what_ends_a_run_is_told_to_torchrun(folder, monkeypatch, error):
    def run(call):
        raise error

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    with contextlib.suppress(ZeroDivisionError):
        assert cli.main("train", run, ["--config", "x.config"]) == 3
    assert "row 3 is broken" in (folder / "error.json").read_text(encoding="utf-8")


def test_a_wrong_level_in_the_variable_is_a_usage_error(folder, run, calls, monkeypatch, capsys):
    monkeypatch.setenv(cli.LOG_VARIABLE, "loud")
    with pytest.raises(SystemExit) as stopped:
        cli.main("train", run, ["--config", "x.config"])
    assert stopped.value.code == 2
    assert "variable RECSYS_LOG: invalid level: 'loud' (choose from debug" in capsys.readouterr().err
    assert calls == []


def test_variables_that_are_set_are_said_at_the_start(folder, run, monkeypatch, capsys):
    flags = ["--config", "x.config", "--run-dir", "here"]
    monkeypatch.delenv("RECSYS_BACKEND", raising=False)
    assert cli.main("train", run, flags) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RECSYS_BACKEND", "reference")
    monkeypatch.setenv(cli.LOG_VARIABLE, "debug")
    assert cli.main("train", run, flags) == 0
    shown = capsys.readouterr().err, (folder / "here" / "log.txt").read_text(encoding="utf-8")
    assert all("RECSYS_BACKEND=reference is set" in text for text in shown)
    assert all("RECSYS_LOG=debug is set" in text for text in shown)


def test_output_that_nobody_reads_is_no_error_message():
    reading, writing = os.pipe()
    os.close(reading)
    command = ["-m", "recsys.train", "--config", "configs/quickstart.config", "--print-config"]
    done = subprocess.run(
        [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_dry_run_and_other_processes_write_no_log(folder, run, calls, monkeypatch):
    assert cli.main("train", run, ["--config", "x.config", "--dry-run"]) == 0
    assert calls[0].dry_run
    monkeypatch.setenv("RANK", "1")
    assert cli.main("train", run, ["--config", "x.config"]) == 0
    assert not (folder / "runs").exists()


def test_a_run_folder_that_cannot_be(folder, run, calls, capsys):
    (folder / "taken").write_text("", encoding="utf-8")
    assert cli.main("train", run, ["--config", "x.config", "--run-dir", "taken"]) == 1
    assert "--run-dir taken: cannot be written" in capsys.readouterr().err
    assert calls == []


def test_a_run_folder_that_may_only_be_read_can_be_used(folder, run, calls, monkeypatch):
    (folder / "there").mkdir()
    (folder / "x.config").rename(folder / "there" / config.FILE_NAME)
    # Root may write anywhere, so permissions would test nothing.
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)
    assert cli.main("export", run, ["--run-dir", "there"]) == 0
    assert [path.name for path in (folder / "there").iterdir()] == [config.FILE_NAME]


def test_vocabularies_are_looked_up(folder, run, capsys):
    (folder / "x.config").write_text(RETRIEVER, encoding="utf-8")
    assert cli.main("train", run, ["--config", "x.config", "--validate"]) == 2
    assert "no file vocabulary/movies.parquet" in capsys.readouterr().err
