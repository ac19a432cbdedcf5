"""`python -m recsys.init FOLDER`: starts a project that trains at once.

The folder gets a sample log of events, the training data and config that `recsys.prepare csv` makes from it,
and a README with the commands; from there users can continue with their own log. With `--config NAME` the
folder gets a ready config instead.
"""

import difflib
import io
import os
import shlex
import shutil
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from recsys import resources
from recsys.errors import ConfigError
from recsys.flags import Parser
from recsys.prepare import command, csv

PREPARE = (
    *("--input", "events.csv", "--output", "sample", "--task", "ranking"),
    *("--user-column", "user_id", "--item-column", "video_id", "--time-column", "time"),
    *("--label", "click=is_click", "--label", "long_view=long_view"),
    *("--action", "click=is_click", "--action", "long_view=long_view", "--watch-time-column", "watch_time"),
    *("--item-feature", "author_id", "--item-number", "duration", "--user-feature", "tab"),
)
"""Flags of `recsys prepare csv` for the sample's columns."""

README = """\
# {name}

A ranking model on a sample of KuaiRand-Pure: which videos does a user click, and which are watched for long?
Run the commands in this folder; they take a few minutes on two CPU cores. `export` needs a C++ compiler.

```
recsys train    --config sample/starter.config --run-dir runs/sample
recsys evaluate --run-dir runs/sample
recsys export   --run-dir runs/sample
recsys predict  --run-dir runs/sample
```

The last one writes `runs/sample/predictions/*.parquet`: for each request of the test split the ids of the
user and of the videos shown, and the probabilities of a click and of a long view. `runs/sample/report.html`
shows how the training went. The same from Python, without `export`:

```python
import polars, recsys

model = recsys.load("runs/sample")
best = model.recommend(polars.read_parquet("sample/test"), k=3, by="click")
print(polars.from_arrow(best))
```

| | |
| --- | --- |
| `events.csv` | the log, one line for each video shown; CC BY-SA 4.0, see `LICENSE` and `SOURCE.md` |
| `sample/` | training data made of it, and the config to change, `sample/starter.config` |

`sample/` was made by the command below. For your own log, name its columns instead, and another `--output`;
`--task retrieval` makes data for a model that finds the next item in the whole catalogue.

```
recsys prepare csv {prepare}
```

`recsys prepare csv --help` explains each flag, and
`recsys train --config sample/starter.config --print-config` shows every setting. `recsys doctor` says what to
type when something does not run.
"""

READY_README = """\
# {name}

`{config}` says in its first lines what it trains, how its data is made and which figures to expect. Run the
commands in this folder.

```
recsys train    --config {config} --validate
recsys train    --config {config} --run-dir runs/{run}
recsys evaluate --run-dir runs/{run}
```
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    return command.run(_run, None if arguments is None else list(arguments))


def _run(arguments: list[str] | None) -> None:
    parser = Parser(
        "python -m recsys.init",
        description="Start a project: sample data, a config, and a README with the commands.",
        epilog="ready configs:\n" + "\n".join(f"  {name}" for name in resources.ready_configs()),
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="folder to create")
    parser.add_argument("--config", metavar="NAME", help="a ready config, instead of the sample")
    options = parser.parse_args(arguments)
    folder = options.folder
    if options.config is None:
        with _new_folder(folder):
            _write_sample(folder)
        first = "recsys train --config sample/starter.config --run-dir runs/sample"
    else:
        source = _ready_config(options.config)
        with _new_folder(folder):
            _write_ready(folder, source)
        first = f"recsys train --config {source.name} --validate"
    print(f"made {folder}; its README.md has the commands, first:")
    print(f"  cd {shlex.quote(str(folder))}\n  {first}")


def _ready_config(name: str) -> Path:
    ready = resources.ready_configs()
    if name not in ready:
        near = difflib.get_close_matches(name, ready, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"--config {name}: no ready config has this name.{hint} Ready configs: {', '.join(ready)}"
        )
    return ready[name]


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Makes the folder, and removes it if the block fails.

    Raises:
        ConfigError: the folder exists and is not empty, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists; nothing was changed. Name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write_sample(folder: Path) -> None:
    for file in ("events.csv", "LICENSE", "SOURCE.md"):
        shutil.copyfile(resources.SAMPLE / file, folder / file)
    # Run in the folder, as a user would, so that the paths in the config are relative to it.
    before = Path.cwd()
    os.chdir(folder)
    try:
        with redirect_stdout(io.StringIO()):
            csv.main(list(PREPARE))
    finally:
        os.chdir(before)
    text = README.format(name=folder.resolve().name, prepare=_wrapped(PREPARE))
    (folder / "README.md").write_text(text, encoding="utf-8")


def _write_ready(folder: Path, source: Path) -> None:
    text = source.read_text(encoding="utf-8").replace(f"configs/{source.name}", source.name)
    (folder / source.name).write_text(text, encoding="utf-8")
    readme = READY_README.format(name=folder.resolve().name, config=source.name, run=source.stem)
    (folder / "README.md").write_text(readme, encoding="utf-8")


def _wrapped(flags: Sequence[str]) -> str:
    """Formats a command's flags with their values, three per line, quoted for a shell."""
    pairs = [shlex.join(flags[start : start + 2]) for start in range(0, len(flags), 2)]
    lines = [" ".join(pairs[start : start + 3]) for start in range(0, len(pairs), 3)]
    return " \\\n    ".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
