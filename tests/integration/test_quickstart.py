"""scripts/quickstart as it is, with a short training and without an install: `exports.py` runs it.

`test_bootstrap.py` has the install, `integration/test_ready_configs.py` the config, and the other integration
tests use the run and the package that it makes.
"""

import re
import shlex
import subprocess
import sys

from tests.integration.exports import QUICKSTART_OUTPUT
from tests.integration.runs import ROOT, one_thread


def test_the_quickstart_from_training_to_predictions(ranker):
    said = ranker.run.parent.joinpath(QUICKSTART_OUTPUT).read_text(encoding="utf-8")
    assert "real rows agree with the evaluated model to" in said and "1839 rows, 0 of them left out" in said
    named = re.search(r"^Done in \d+ s\.\n\n(.*?)\n\n", said, re.MULTILINE | re.DOTALL).group(1)
    places = re.findall(r"runs/quickstart/?([\w./]*)", named)
    assert len(places) == 7 and "export" in places
    assert all((ranker.run / place).exists() for place in places if place != "export")
    # The commands that it suggests next are right too.
    after = said.split("What to type next:")[1]
    for line in re.findall(r"^  (python .*)", after, re.MULTILINE):
        stops_by_itself = "--help" in line or "--print-config" in line
        command = [sys.executable, *shlex.split(line)[1:], *([] if stops_by_itself else ["--validate"])]
        subprocess.run(command, cwd=ROOT, env=one_thread(), capture_output=True, check=True)
