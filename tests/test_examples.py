"""The examples for Docker, Slurm and Kubernetes, tried as far as no engine or cluster is needed."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from recsys import errors
from recsys.__main__ import COMMANDS
from tests import test_readme
from tests.integration.runs import CONFIG, command, one_thread, records, wait_for

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "examples/docker/Dockerfile"
SBATCH = ROOT / "examples/slurm/train.sbatch"
JOB = ROOT / "examples/kubernetes/job.yaml"

SRUN = """\
# One process a node, as --ntasks-per-node=1 says; signals are handed on to all.
trap 'kill -TERM $(jobs -p)' TERM
for node in $(seq "$SLURM_NNODES"); do "$@" & tasks="$tasks $!"; done
# The signal ends one `wait`.
wait $tasks
code=0
for task in $tasks; do wait "$task" || code=$?; done
exit "$code"
"""
RECORD = """printf '%s\\n' "$(basename "$0") $*" >>"$RECORD"\n"""
BASH = "#!/bin/bash\n"
UNTIL_TERM = "trap 'kill $!; exit {code}' TERM; sleep 60 & RECORD; wait"
"""A `torchrun` that trains until it is stopped, and records its call when it is ready for that."""


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with their arguments, each on one line."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line.strip()]


def copied() -> list[tuple[list[str], str]]:
    """Sources in the clone and the target of each COPY."""
    words = [arguments.split() for name, arguments in instructions() if name == "COPY"]
    return [(sources, target) for *sources, target in words if not sources[0].startswith("--from=")]


def test_the_wheel_of_the_image_is_built_from_what_is_copied(tmp_path):
    ignored, kept = [], []
    for line in DOCKERFILE.with_suffix(".dockerignore").read_text(encoding="utf-8").splitlines()[1:]:
        (kept if line.startswith("!") else ignored).append(line.removeprefix("!"))
    assert ignored[0] == "*"
    for sources, target in copied():
        for source in sources:
            assert source in kept
            to = tmp_path / target / (Path(source).name if target.endswith("/") or target == "./" else "")
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                skip = [Path(pattern).name for pattern in ignored[1:]]
                shutil.copytree(ROOT / source, to, ignore=lambda _, names, skip=skip: skipped(names, skip))
            else:
                shutil.copy(ROOT / source, to)
    (build,) = (text for name, text in instructions() if name == "RUN" and "pip wheel" in text)
    python, *words = shlex.split(build)
    assert python == "python"
    words[words.index("/wheels")] = str(tmp_path / "wheels")
    subprocess.run([sys.executable, *words, "--no-build-isolation", "--quiet"], cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "recsys/protos/model_pb2.py",
        "recsys/ready_configs/ml_1m_hstu.config",
        "recsys/sample/events.csv",
    } <= names


def skipped(names: list[str], patterns: list[str]) -> set[str]:
    return {name for name in names for pattern in patterns if fnmatch.fnmatch(name, pattern)}


def test_the_image_installs_and_starts_what_the_package_offers():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    runs = " ".join(text for name, text in instructions() if name == "RUN")
    (extra,) = re.findall(r"\[(\w+)\]", runs)
    assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
    (program,) = next(json.loads(text) for name, text in instructions() if name == "ENTRYPOINT")
    assert re.search(rf"^\[project.scripts\]\n{program} = ", project, re.MULTILINE)
    installed = re.search(rf"{program} ([\w-]+) ;;", runs)
    assert installed is not None and installed[1] in COMMANDS


def test_the_readme_runs_what_the_image_is_asked_to_do():
    """A container hands the arguments behind its image to `recsys`, or to torchrun."""
    text = DOCKERFILE.with_name("README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\$run (?:--gpus all )?recsys(?:-gpu)? (.*)", text, re.MULTILINE)
    lines += re.findall(r"^\$run .* recsys-gpu .*-m recsys\.(.*)", text, re.MULTILINE)
    assert len(lines) == text.count("$run ")
    assert {f"recsys {line}" for line in lines} <= test_readme.RUN.keys()


class Cluster:
    """A folder with stand-ins for Slurm's commands on PATH, and the environment of a job."""

    def __init__(self, folder: Path, *, torchrun: str | None):
        self.record = folder / "record"
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        programs = {"srun": SRUN, "scontrol": f"{RECORD}echo localhost"}
        if torchrun is None:
            programs["torchrun"] = f'exec "{sys.executable}" -m torch.distributed.run "$@"'
            programs["python"] = f'exec "{sys.executable}" "$@"'
        else:
            programs |= {"python": RECORD, "torchrun": torchrun.replace("RECORD; ", RECORD)}
        for name, text in programs.items():
            (bin_folder / name).write_text(f"{BASH}{text}\n", encoding="utf-8")
            (bin_folder / name).chmod(0o755)
        self.environment = one_thread() | {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RECORD": str(self.record),
            "SLURM_JOB_ID": str(free_port() - 20000),
            "SLURM_JOB_NODELIST": "nodes[1-2]",
            "SLURM_NNODES": "2",
        }

    def submit(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(SBATCH), *map(str, arguments)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def recorded(self, program: str) -> list[list[str]]:
        """Arguments of each call of a program so far."""
        text = self.record.read_text(encoding="utf-8") if self.record.exists() else ""
        return [shlex.split(line)[1:] for line in text.splitlines() if line.split()[0] == program]


def free_port() -> int:
    """A port that is free, of those that the script makes out of the numbers of jobs."""
    for port in range(20000 + os.getpid() % 10000, 40000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise OSError("no free port")


@pytest.mark.parametrize(
    ("torchrun", "is_stopped", "code", "comes_back"),
    [
        ("RECORD; exit 0", False, 0, False),
        ("RECORD; exit 1", False, 1, False),
        (UNTIL_TERM.format(code=1), True, 1, True),
        (UNTIL_TERM.format(code=0), True, 0, False),
    ],
    ids=["done", "failed", "stopped", "done at the last moment"],
)
def test_a_slurm_job_comes_back_if_its_time_was_up(tmp_path, torchrun, is_stopped, code, comes_back):
    cluster = Cluster(tmp_path, torchrun=torchrun)
    job = cluster.submit(CONFIG, tmp_path / "run", "--set", "train.seed=2")
    if is_stopped:
        wait_for(lambda: len(cluster.recorded("torchrun")) == 2, job)
        job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == code, output
    requeued = ["requeue", cluster.environment["SLURM_JOB_ID"]]
    assert (requeued in cluster.recorded("scontrol")) == comes_back


def test_the_commands_of_the_slurm_job_are_valid(tmp_path):
    cluster = Cluster(tmp_path, torchrun="RECORD; exit 0")
    cluster.submit(CONFIG, tmp_path / "run", "--set", "train.seed=2").communicate(timeout=30)
    ((_, module, *checked),) = cluster.recorded("python")
    assert module == "recsys.train" and command("train", *checked) == "ok\n"
    first, second = cluster.recorded("torchrun")
    assert first == second
    check_launch(first, checked[:-1], nodes="2", processes="1")


def check_launch(words: list[str], training: list[str], *, nodes: str, processes: str) -> None:
    """Parses a command line of torchrun as torchrun does."""
    parsed = get_args_parser().parse_args(words)
    assert (parsed.nnodes, parsed.nproc_per_node) == (nodes, processes)
    assert parsed.module and parsed.training_script == "recsys.train"
    assert parsed.training_script_args == training


def test_the_kubernetes_job_checks_its_config_and_trains_with_it(tmp_path):
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))["spec"]
    pod = job["template"]["spec"]
    (check,), (train,) = pod["initContainers"], pod["containers"]
    assert check["command"][:3] == ["python", "-m", "recsys.train"]
    shutil.copy(CONFIG, tmp_path / "x.config")
    words = [word.replace("/data/", f"{tmp_path}/") for word in check["command"][3:]]
    assert command("train", *words) == "ok\n" and words[-1] == "--validate"
    program, *launch = train["command"]
    assert program == "torchrun"
    check_launch(launch, check["command"][3:-1], nodes="1:1", processes="8")
    final = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    kinds = (errors.ConfigError, errors.DataError, errors.InstallationError)
    assert final["values"] == [kind.exit_code for kind in kinds] and final["containerName"] == check["name"]
    mounted = {mount["name"] for mount in check["volumeMounts"] + train["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (grace,) = (int(x["value"]) for x in train["env"] if x["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert grace < pod["terminationGracePeriodSeconds"]


@pytest.mark.slow
def test_a_slurm_job_that_was_stopped_goes_on_where_it_was(tmp_path):
    """Two nodes are two launchers of one machine, with a process each; torchrun and training are real."""
    cluster = Cluster(tmp_path, torchrun=None)
    run = tmp_path / "run"
    arguments = (CONFIG, run, "--set", "train.checkpoint.every_steps=1000", "--set", "train.num_steps=400")
    job = cluster.submit(*arguments, "--set", "train.evaluation.every_steps=1000")
    wait_for(lambda: max(records(run), default=0) >= 5, job)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 1, output
    assert "2 process(es)" in output and "stopped by signal 15" in output
    stopped_at = max(records(run))
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{stopped_at:08d}"]
    assert ["requeue", cluster.environment["SLURM_JOB_ID"]] in cluster.recorded("scontrol")
    last = stopped_at + 5
    arguments = (*arguments[:-1], f"train.num_steps={last}", "--set", "train.evaluation.every_steps=1000")
    output, _ = cluster.submit(*arguments).communicate(timeout=120)
    assert sorted(records(run)) == list(range(1, last + 1)), output
