"""Damages folders by thousands, each case in a process of its own:

    python -m tests.fuzz --cases 2000 --seed 1 [--only evaluate] [--folders /tmp/fuzz]

A case is a finding if an exception escapes or is printed, if the process dies or takes a minute, if its exit
code is none of the documented ones, if it ends without a message or with a page of text, or if something
half-written stays. The report lists every finding with the seed that repeats it, and every message once, to
be read aloud.
"""

import argparse
import contextlib
import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import torch

from tests.fuzz.damage import Damaged, damage
from tests.fuzz.folders import CONFIGS, Scenario, choose, copy, make, scenarios

CODES = {0, 1, 2, 3, 4, 5}
ESCAPED = 99
MOST_SECONDS = 60
NOBODY = 65534
UNWANTED = ("Traceback (most recent", "--- Logging error ---", "Exception ignored", "Fatal Python error")


class Outcome(NamedTuple):
    """The end of a case: exit code, minus a signal's number; output; seconds."""

    code: int
    output: str
    seconds: float


def run(scenario: Scenario, root: Path, output: Path) -> Outcome:
    """Runs the command in the folder in a forked process, as a user without privileges."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_child(scenario, root, output)
    code = None
    while code is None and time.monotonic() < started + MOST_SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.002)
    if code is None:
        os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Outcome(code, output.read_text(errors="replace"), time.monotonic() - started)


def _be_child(scenario: Scenario, root: Path, output: Path) -> None:
    code = ESCAPED
    try:
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(root)
        if os.getuid() == 0:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        resource.setrlimit(resource.RLIMIT_AS, (24 << 30, 24 << 30))
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 29, 3 << 29))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            code = scenario.action()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else ESCAPED
        except BaseException:  # noqa: BLE001 - an escaped exception is what is searched for
            traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def faults(outcome: Outcome, how: str, left: set[Path]) -> list[str]:
    """Describes what is wrong with the end of a case, which left some new files; empty if nothing is."""
    results = []
    if outcome.seconds > MOST_SECONDS:
        return [f"took more than {MOST_SECONDS} s"]
    if outcome.code not in CODES:
        results.append(f"code {outcome.code}")
    results += [f"printed {text!r}" for text in UNWANTED if text in outcome.output]
    said = message(outcome.output)
    if outcome.code in CODES - {0}:
        if not said:
            results.append("said nothing")
        elif len(said) > 3000:
            results.append(f"said {len(said):,} characters")
    # Nobody can remove what lies in a folder without permissions.
    if "forbidden_folder" not in how:
        results += [f"left {x}" for x in left if x.name.startswith(".") and x.suffix in (".partial", ".old")]
    return results


def _walk(root: Path) -> set[Path]:
    return {
        Path(folder, name).relative_to(root)
        for folder, folders, names in os.walk(root)
        for name in (*folders, *names)
    }


def message(output: str) -> str:
    """The errors of an output: all lines but those of other levels of the log."""
    lines = [
        x
        for x in output.splitlines()
        if not re.match(r"\d\d:\d\d:\d\d (INFO|WARNING)|^(step|[\w@/]+ +[\d.-]+|nan)", x)
    ]
    return "\n".join(lines)


def alike(text: str) -> str:
    """A message without what differs from case to case."""
    text = re.sub(r"\d\d:\d\d:\d\d ", "", text)
    text = re.sub(r"/tmp/\S*?case-\S*?/", "", text)
    text = re.sub(r"step-\d+", "step-N", text)
    return re.sub(r"\d+", "0", text)[:600]


def case(seed: int, flags: argparse.Namespace, place: Path) -> tuple[str, Damaged, Outcome, list[str]]:
    """Runs the case of a seed."""
    generator = random.Random(seed)
    kind = generator.choice(flags.kinds)
    scenario = choose(generator, kind, packages=True, only=flags.only)
    root = Path(tempfile.mkdtemp(prefix="case-", dir=place))
    output = place / "output.txt"
    try:
        copy(flags.folders / kind, root)
        damaged = damage(root, scenario.parts, generator)
        if os.getuid() == 0:
            _give_away(root)
        before = _walk(root)
        outcome = run(scenario, root, output)
        wrong = faults(outcome, damaged.how, _walk(root) - before)
        damaged = damaged._replace(path=damaged.path.relative_to(root))
        return f"{kind}, {scenario.name}", damaged, outcome, wrong
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _give_away(root: Path) -> None:
    for path in [root, *(root / x for x in _walk(root))]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first case; the next has the next one"
    )
    parser.add_argument("--only", help="name of a scenario")
    parser.add_argument("--kinds", nargs="+", choices=sorted(CONFIGS), default=sorted(CONFIGS))
    parser.add_argument("--folders", type=Path, help="where the folders to damage are kept between calls")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--show", action="store_true", help="print the output of each case")
    flags = parser.parse_args()
    # Threads of OpenMP do not survive the fork of a case, which would die in its first product.
    torch.set_num_threads(1)
    flags.folders = flags.folders or Path(tempfile.mkdtemp(prefix="folders-"))
    for kind in flags.kinds:
        if not (flags.folders / kind).exists():
            make(flags.folders / kind, kind, packages=True)
    place = Path(tempfile.mkdtemp(prefix="fuzz-"))
    place.chmod(0o755)
    _warm_up(flags, place)
    messages: dict[str, list[str]] = defaultdict(list)
    codes: Counter[tuple[str, int]] = Counter()
    actual = count = 0
    started = time.monotonic()
    for seed in range(flags.seed, flags.seed + flags.cases):
        if time.monotonic() > started + flags.seconds:
            break
        name, damaged, outcome, wrong = case(seed, flags, place)
        count += 1
        codes[name, outcome.code] += 1
        where = f"seed {seed} ({name}): {damaged.path} {damaged.how}"
        if wrong or flags.show:
            actual += bool(wrong)
            print(f"FINDING {where}: {'; '.join(wrong)}\n{outcome.output[-2500:]}", flush=True)
        if outcome.code:
            messages[alike(message(outcome.output))].append(where)
        else:
            messages["(accepted) " + damaged.path.name + ", " + damaged.how.split(":")[0]].append(where)
    shutil.rmtree(place)
    print(f"\n{len(messages)} different messages:")
    for text, cases in sorted(messages.items()):
        print(f"--- {len(cases)} x, e.g. {cases[0][:300]}\n{text}")
    print(f"\n{count} cases from seed {flags.seed}, {time.monotonic() - started:.0f} s, {actual} findings")
    print(", ".join(f"{name}: {code} x {number}" for (name, code), number in sorted(codes.items())))
    return min(actual, 1)


def _warm_up(flags: argparse.Namespace, place: Path) -> None:
    """Runs each scenario once in this process, so that the forked ones have all modules loaded."""
    here = Path.cwd()
    for kind in flags.kinds:
        root = place / kind
        copy(flags.folders / kind, root)
        os.chdir(root)
        for scenario in scenarios(kind, packages=True):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                code = scenario.action()
            assert code == 0, f"{kind}, {scenario.name}: {code} without damage"
        os.chdir(here)
        shutil.rmtree(root)


if __name__ == "__main__":
    raise SystemExit(main())
