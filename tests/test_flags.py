"""Tests what the parser of all commands answers to mistakes."""

import pytest

from recsys.flags import Parser
from recsys.sid.command import fit


@pytest.mark.parametrize(
    "arguments, answer",
    [
        (
            ["--embedings", "x", "--output", "y"],
            "unrecognized arguments: --embedings x. Did you mean --embeddings? --help lists the flags.",
        ),
        (
            ["--outptu=y"],
            "unrecognized arguments: --outptu=y. Did you mean --output? --help lists the flags.",
        ),
        (["--output", "y"], "the following arguments are required: --embeddings. --help lists the flags."),
    ],
)
def test_a_misspelled_flag_is_named_although_a_required_one_is_missing(arguments, answer, capsys):
    with pytest.raises(SystemExit, match="2"):
        fit(arguments)
    assert capsys.readouterr().err == f"python -m recsys.sid fit: {answer}\n"


@pytest.mark.parametrize("arguments", [["--output", ""], ["--output=", "--embeddings", "x"]])
def test_an_empty_value_is_an_error_because_an_empty_path_is_the_current_folder(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        fit(arguments)
    assert "fit: argument --output: its value is empty. --help" in capsys.readouterr().err


def test_a_missing_positional_argument_is_named_unless_a_flag_is_unknown(capsys):
    parser = Parser("tool")
    parser.add_argument("folder")
    parser.add_argument("--seed")
    for arguments, answer in (
        ([], "the following arguments are required: folder. "),
        (["--sed=1"], "unrecognized arguments: --sed=1. Did you mean --seed? "),
    ):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args(arguments)
        assert capsys.readouterr().err.startswith(f"tool: {answer}")
