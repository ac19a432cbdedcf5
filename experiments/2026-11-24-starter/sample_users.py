"""Writes the logs of the record: users drawn from ML-1M, and a synthetic log of 1,500 users.

python sample_users.py ml-1m.zip OUTPUT   # OUTPUT/ml300.csv, ml1000.csv, ml3000.csv, synthetic.csv
"""

import csv
import random
import sys
import zipfile
from pathlib import Path

import numpy as np


def main(archive: Path, output: Path) -> None:
    """Writes the four files."""
    output.mkdir(parents=True, exist_ok=True)
    lines = zipfile.ZipFile(archive).read("ml-1m/ratings.dat").decode().splitlines()
    ratings = [line.split("::") for line in lines]
    users = sorted({rating[0] for rating in ratings}, key=int)
    random.Random(7).shuffle(users)
    for count in (300, 1000, 3000):
        drawn = set(users[:count])
        rows = [(user, item, time) for user, item, _, time in ratings if user in drawn]
        write(output / f"ml{count}.csv", rows)
    write(output / "synthetic.csv", synthetic_events())


def synthetic_events() -> list[tuple[int, int, int]]:
    """Makes events of 1,500 users and 600 items in 20 topics.

    A user stays with a topic; three of ten events follow from the item before, and items repeat.
    """
    generator = np.random.default_rng(3)
    popularity = generator.zipf(1.3, 600).clip(1, 200).astype(float)
    topics = generator.integers(0, 20, 600)
    events = []
    for user in range(1500):
        length = int(np.clip(generator.lognormal(2.7, 0.8), 3, 200))
        time, topic, last = 1.7e9 + generator.integers(0, 1e6), generator.integers(20), None
        for _ in range(length):
            if last is not None and generator.random() < 0.3:
                item = (last * 7 + 1 + int(generator.integers(3))) % 600
            else:
                if generator.random() < 0.15:
                    topic = generator.integers(20)
                chances = popularity * (topics == topic)
                item = int(generator.choice(600, p=chances / chances.sum()))
            time += int(generator.exponential(3600))
            events.append((user, item, int(time)))
            last = item
    return events


def write(path: Path, rows: list[tuple]) -> None:
    """Writes user, item and time of each event."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["uid", "item", "ts"])
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
