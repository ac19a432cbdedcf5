"""`python -m recsys.install`: installs the torch, fbgemm and torchrec that fit this machine and each other.

They only work in matching versions (`recsys.environment.TESTED`), while pip takes the newest of each, so a
plain `pip install` of this package leaves them out. This command keeps an installed torch (2.11, 2.12 or
2.13), else takes the newest tested one, and picks the fbgemm-gpu and torchrec that match it.

With an NVIDIA driver, it takes torch 2.11, whose Triton the kernels for Hopper need, an assembler that
compiles them correctly (nvidia-cuda-nvcc), and the CUDA build, fbgemm-gpu. That build cannot be imported
without a driver, so other machines get fbgemm-gpu-cpu. torchrec requires the name `fbgemm-gpu` in either
case, hence a stand-in distribution of that name, which contains only the requirement on fbgemm-gpu-cpu of the
same version. One pip call installs everything, and `pip check` stays clean. In a clone the same call installs
the package, editable.

pip's own settings apply (`PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`, pip.conf). This module needs only the
standard library. The exit code is 5 if the machine does not fit, else pip's or `recsys.doctor`'s.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import platform
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from recsys import resources
from recsys.environment import (
    FOR_GPUS,
    PACKAGED_PTXAS,
    TESTED,
    Row,
    driver_version,
    installed_version,
    tested_row,
)
from recsys.errors import InstallationError
from recsys.flags import Parser

ALIAS_FOLDER = Path(sys.prefix) / "share" / "recsys"
"""Folder of the stand-in for fbgemm-gpu, which is kept so that the printed pip line can be typed again."""


class Plan(NamedTuple):
    """The commands to run, in order.

    Attributes:
        uninstall: distributions to remove first, because both builds of FBGEMM own the same files.
        alias: path at which to write the stand-in for fbgemm-gpu; None on a machine with a driver.
        install: arguments of the single `pip install`.
        reasons: one line per choice, for the user.
    """

    uninstall: list[str]
    alias: Path | None
    install: list[str]
    reasons: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser = Parser(
        "python -m recsys.install",
        description="Install the torch, fbgemm and torchrec that fit this machine, with one pip call.",
        allow_abbrev=False,
    )
    clone = resources.clone()
    if clone is not None:
        parser.add_argument("--dev", action="store_true", help="also the test and lint tools")
    parser.add_argument("--skip-doctor", action="store_true", help="do not run recsys.doctor at the end")
    parser.add_argument("--dry-run", action="store_true", help="print what would run, change nothing")
    options = parser.parse_args(arguments)
    package = ["--editable", ".[dev]" if options.dev else "."] if clone is not None else []
    try:
        plan = make_plan(
            torch=installed_version("torch"),
            fbgemm=installed_version("fbgemm-gpu"),
            fbgemm_cpu=installed_version("fbgemm-gpu-cpu"),
            driver=driver_version(),
            system=f"{platform.system()} {platform.machine()}",
            package=package,
        )
        print("\n".join(plan.reasons))
        return run(plan, clone or Path.cwd(), dry_run=options.dry_run, doctor=not options.skip_doctor)
    except InstallationError as error:
        print(f"recsys.install: {error}", file=sys.stderr)
        return error.exit_code


def make_plan(
    *,
    torch: str | None,
    fbgemm: str | None,
    fbgemm_cpu: str | None,
    driver: str | None,
    system: str,
    package: Sequence[str] = (),
) -> Plan:
    """Chooses versions by the installed versions and the driver's version (None: not there).

    Args:
        package: what pip installs in addition, for example `--editable .`.

    Raises:
        InstallationError: no tested row fits the installed torch, or FBGEMM has no wheels for the system.
    """
    if system.lower() not in ("linux x86_64", "linux aarch64"):
        raise InstallationError(
            f"this is {system}; FBGEMM has wheels for Linux x86_64 and Linux aarch64 only"
        )
    cuda = driver is not None and not (torch or "").endswith("+cpu")
    row, reasons = _choose_row(torch, cuda)
    reasons.append(_why_build(cuda, driver))
    if not cuda and torch is None:
        reasons.append(
            "(torch comes from pip's indexes; with PyTorch's CPU index among them it is ~10x smaller)"
        )
    alias = None if cuda else ALIAS_FOLDER / f"fbgemm_gpu-{row.fbgemm}+cpu-py3-none-any.whl"
    in_the_way = fbgemm_cpu is not None if cuda else fbgemm is not None and not fbgemm.endswith("+cpu")
    present = {"fbgemm-gpu": fbgemm, "fbgemm-gpu-cpu": fbgemm_cpu}
    uninstall = [name for name, version in present.items() if version] if in_the_way else []
    install = [
        f"torch=={torch or row.torch + '.0'}",
        f"torchrec=={row.torchrec}",
        str(alias) if alias else f"fbgemm-gpu=={row.fbgemm}",
        *([PACKAGED_PTXAS] if cuda else []),
        *package,
    ]
    return Plan(uninstall, alias, install, reasons)


def run(plan: Plan, folder: Path, *, dry_run: bool, doctor: bool = True) -> int:
    """Prints the plan and, unless `dry_run`, executes it in `folder` until an exit code is not 0. Runs
    `recsys.doctor` at the end, or leaves it out.

    Raises:
        InstallationError: this Python has no pip, or its folder cannot be written.
    """
    python = [sys.executable, "-m"]
    commands = [[*python, "pip", "install", *plan.install]]
    if doctor:
        commands.append([*python, "recsys.doctor", "--quick"])
    if plan.uninstall:
        commands.insert(0, [*python, "pip", "uninstall", "--yes", *plan.uninstall])
    if not dry_run and importlib.util.find_spec("pip") is None:
        raise InstallationError(f"{sys.executable} has no pip. Type: {sys.executable} -m ensurepip")
    if plan.alias is not None and not dry_run:
        write_alias_wheel(plan.alias)
    for command in commands:
        print(f"+ {shlex.join(command)}", flush=True)
        if not dry_run:
            status = subprocess.run(command, cwd=folder, check=False).returncode
            if status != 0:
                return status
    return 0


def write_alias_wheel(path: Path) -> None:
    """Writes a wheel without code that requires fbgemm-gpu-cpu, with the name and version that `path` says.

    Raises:
        InstallationError: the wheel cannot be written.
    """
    name, version = path.name.split("-")[:2]
    folder = f"{name}-{version}.dist-info"
    texts = {
        f"{folder}/METADATA": (
            f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            "Summary: Stand-in on machines without an NVIDIA driver: the code is in fbgemm-gpu-cpu\n"
            f"Requires-Dist: fbgemm-gpu-cpu=={version.removesuffix('+cpu')}\n"
        ),
        f"{folder}/WHEEL": (
            "Wheel-Version: 1.0\nGenerator: recsys.install\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        ),
    }
    record = "".join(f"{file},{_record_hash(text)},{len(text.encode())}\n" for file, text in texts.items())
    texts[f"{folder}/RECORD"] = record + f"{folder}/RECORD,,\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path, "w") as wheel:
            for file, text in texts.items():
                wheel.writestr(file, text)
    except OSError as error:
        make_venv = "python3 -m venv .venv && source .venv/bin/activate"
        raise InstallationError(
            f"{path}: cannot be written ({error.strerror}). Use a virtual environment: {make_venv}"
        ) from None


def _choose_row(torch: str | None, cuda: bool) -> tuple[Row, list[str]]:
    if torch is None and cuda:
        return FOR_GPUS, [f"torch: {FOR_GPUS.torch}.0, the one that is tested on GPUs (none is installed)"]
    if torch is None:
        row = TESTED[-1]
        return row, [f"torch: {row.torch}.0, the newest tested (none is installed)"]
    row = tested_row(torch)
    if row is None:
        allowed = ", ".join(row.torch for row in TESTED)
        raise InstallationError(
            f"torch {torch} is installed, but only {allowed} are tested. Use a fresh venv, or type: "
            f"{sys.executable} -m pip uninstall torch"
        )
    reasons = [f"torch: {torch}, kept as installed"]
    if cuda and row != FOR_GPUS:
        reasons.append(f"(on a Hopper GPU the fastest kernels need torch {FOR_GPUS.torch}, for its Triton)")
    return row, reasons


def _why_build(cuda: bool, driver: str | None) -> str:
    if cuda:
        return f"fbgemm: CUDA build, for the NVIDIA driver {driver}"
    reason = (
        "torch is a CPU build" if driver is not None else "no NVIDIA driver (libnvidia-ml.so.1 does not load)"
    )
    return f"fbgemm: CPU build, {reason}"


def _record_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
