"""The console command `recsys`: its table, its mistakes, and completion in a shell."""

import importlib
import os
import subprocess
import sys

import pytest

from recsys import __main__ as console


def test_every_command_has_a_main_that_takes_arguments(capsys):
    for name, command in console.COMMANDS.items():
        with pytest.raises(SystemExit, match="0"):
            console.main([name, "--help"])
        assert f"python -m {command.module.removesuffix('.__main__')}" in capsys.readouterr().out
        assert importlib.util.find_spec(command.module) is not None


def test_the_arguments_and_the_exit_code_are_those_of_the_command(capsys):
    assert console.main(["train", "--config", "missing.config"]) == 2
    assert "missing.config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "no command 'trian'. Did you mean train?"),
        (["zzz"], "no command 'zzz'. Commands: "),
        ([], "no command is given. Commands: install, "),
        (["prepare", "cvs"], "no command 'cvs'. Did you mean csv?"),
        (["train", "--confg", "x"], "Did you mean --config?"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_meant(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        console.main(arguments)
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_help_and_version_import_no_library():
    code = (
        "import sys; from recsys.__main__ import main\n"
        "try: main([{!r}])\n"
        "except SystemExit as end: print(end.code, *sorted(sys.modules), sep='\\n', file=sys.stderr)"
    )
    for flag, shown in (("--help", "evaluate "), ("--version", "recsys 0.")):
        done = subprocess.run(
            [sys.executable, "-c", code.format(flag)], capture_output=True, text=True, check=True
        )
        exit_code, *imported = done.stderr.split()
        assert exit_code == "0" and shown in done.stdout
        assert not {"torch", "numpy", "polars", "pyarrow", "google.protobuf", "recsys.config"} & {*imported}


def test_a_reader_that_has_read_enough_ends_a_command_quietly():
    for command in ("--version", "install --dry-run"):
        # Unbuffered, so that each line meets the closed pipe.
        line = f"(sleep 0.5; {sys.executable} -u -m recsys {command}; echo $? >&2) | true"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert done.stderr == "141\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("recsys tr", {"train"}),
        ("recsys doctor --q", {"--quick"}),
        ("recsys train --log-level w", {"warning"}),
        ("recsys prepare mo", {"movielens"}),
        ("recsys prepare csv --user-c", {"--user-column"}),
    ],
)
def test_a_shell_completes_commands_tools_flags_and_choices(tmp_path, line, expected):
    pytest.importorskip("argcomplete")
    variables = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "completions"),
    }
    subprocess.run([sys.executable, "-m", "recsys"], env={**os.environ, **variables}, check=True)
    assert {word.strip() for word in (tmp_path / "completions").read_text().splitlines()} == expected
