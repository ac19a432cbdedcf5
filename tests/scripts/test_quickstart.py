"""scripts/quickstart as it is, with a short training, where an install stands in.

`test_bootstrap.py` has the install, and `integration/test_ready_configs.py` the config.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.integration.runs import one_thread

ROOT = Path(__file__).resolve().parents[2]


def test_the_quickstart_from_training_to_predictions(tmp_path):
    for name in ("recsys", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("configs", "scripts"):
        (tmp_path / name).mkdir()
    config = (ROOT / "configs" / "quickstart.config").read_text(encoding="utf-8")
    assert "num_epochs: 2" in config and "warmup_steps: 50" in config
    short = config.replace("num_epochs: 2", "num_steps: 30").replace("warmup_steps: 50", "warmup_steps: 10")
    (tmp_path / "configs" / "quickstart.config").write_text(short, encoding="utf-8")
    script = tmp_path / "scripts" / "quickstart"
    script.write_text((ROOT / "scripts" / "quickstart").read_text(encoding="utf-8"))
    (tmp_path / "scripts" / "_bootstrap.sh").write_text("bootstrap() { :; }\n")
    stand_in = tmp_path / ".venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    stand_in.chmod(0o755)
    environment = one_thread() | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        ["bash", str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "real rows agree with the evaluated model to" in said and "1839 rows, 0 of them left out" in said
    named = re.search(r"^Done in \d+ s\.\n\n(.*?)\n\n", done.stdout, re.MULTILINE | re.DOTALL).group(1)
    places = re.findall(r"runs/quickstart[\w./]*", named)
    assert len(places) == 7 and all((tmp_path / place).exists() for place in places)
    # The commands that it suggests next are right too.
    after = done.stdout.split("What to type next:")[1]
    for line in re.findall(r"^  (python .*)", after, re.MULTILINE):
        stops_by_itself = "--help" in line or "--print-config" in line
        command = [sys.executable, *shlex.split(line)[1:], *([] if stops_by_itself else ["--validate"])]
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
