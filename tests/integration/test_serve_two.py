"""`recsys.serve` with two packages, and with its page."""

import csv
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys import files
from tests.integration.runs import command
from tests.integration.test_serve import asked_by_stream, predicted, rows_for, said_by_serve, same, serving

NASTY = '<script>alert("1")</script> & co'


@pytest.fixture(scope="module")
def twins(ranker, tmp_path_factory):
    """Two packages with different versions and equal weights."""
    folder = tmp_path_factory.mktemp("twins")
    for name in ("a", "b"):
        shutil.copytree(ranker.package, folder / name)
    described = folder / "b" / "package.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"step": 41}))
    files.write_manifest(folder / "b")
    return folder


def test_users_are_divided_and_stay_where_they_are(ranker, twins, tmp_path):
    wanted = predicted(ranker, tmp_path, 60)
    both = ("--package", twins / "b", "--share", 0.3)
    seen = []
    for attempt in range(2):
        with serving(twins / "a", *both) as running:
            asked = rows_for(running.client, wanted.rows)
            whole = running.client.post("/score", json={"rows": asked}).json()
            assert same(whole["rows"], wanted.answers)
            seen.append(whole["models"])
            by_stream = asked_by_stream(running.client, asked).json()
            assert by_stream["models"] == whole["models"] and same(by_stream["rows"], whole["rows"])
            versions = running.client.get("/readyz").json()["model"].split()
            if attempt == 0:
                by_user = {row["user_id"]: model for row, model in zip(asked, whole["models"], strict=True)}
                assert all(
                    by_user[row["user_id"]] == m for row, m in zip(asked, whole["models"], strict=True)
                )
                # 30 % of the users: 4 standard deviations around it.
                share = Counter(by_user.values())[versions[1]] / len(by_user)
                assert abs(share - 0.3) < 4 * (0.3 * 0.7 / len(by_user)) ** 0.5 and 0 < share < 1
                check_one_row_at_a_time(running.client, asked, whole["models"])
                check_bad_row(running.client, asked)
                without = {name: value for name, value in asked[0].items() if name != "user_id"}
                answer = running.client.post("/score", json={"rows": [without]}).json()
                assert answer["models"] == versions[:1]
                assert running.client.get("/").status_code == 404
    assert seen[0] == seen[1]


def check_one_row_at_a_time(client, asked, models):
    """A request of one user names the package that answered, as do the metrics."""
    for row, model in zip(asked[:6], models, strict=False):
        answer = client.post("/score", json={"rows": [row]}).json()
        assert (answer["model"], answer["models"]) == (model, [model])
    text = client.get("/metrics").text
    counted = {
        name: float(text.split(f'recsys_rows_total{{package="{name}"}} ')[1].split()[0]) for name in "AB"
    }
    in_order = Counter(
        "A" if model.startswith("step-40-") else "B" for model in [*models, *models, *models[:6]]
    )
    # All rows were asked for twice.
    assert counted == in_order
    for name, step in (("A", 40), ("B", 41)):
        assert f'recsys_model_info{{package="{name}",version="step-{step}-' in text
    assert "process_resident_memory_bytes" in text


def check_bad_row(client, asked):
    """A bad row is told by its place in the request, whichever package refuses it."""
    for place in range(4):
        rows = [dict(row) for row in asked[:4]]
        rows[place]["request_time"] = -5
        refused = client.post("/score", json={"rows": rows})
        assert refused.status_code == 422
        assert [finding["field"] for finding in refused.json()["findings"]] == [f"rows[{place}]"]


class Tables(HTMLParser):
    """The cells of tables by the table's id, and texts of paragraphs by theirs."""

    def __init__(self, text: str):
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.texts: dict[str, str] = {}
        self._table: list[list[str]] | None = None
        self._place = None
        self.tags = Counter()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        name = dict(attributes).get("id")
        if tag == "table":
            self._table = self.tables[name] = []
        elif tag == "tr":
            self._table.append([])
        self._place = (tag, name)

    def handle_endtag(self, tag):
        self._place = None

    def handle_data(self, data):
        tag, name = self._place or (None, None)
        if tag in ("td", "th"):
            self._table[-1].append(data)
        elif tag == "p" and name:
            self.texts[name] = data


def page_flags(folder: Path, items: Iterable) -> tuple:
    """Flags of a page for the rows that `predicted` wrote, with names of items that are no HTML."""
    with (folder / "names.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "name"), *((item, f"{NASTY} {item}") for item in items)])
    return ("--page-rows", folder / "rows.parquet", "--item-names", folder / "names.csv")


def only_row(wanted) -> int:
    """The place of the first row with a history whose user has no other row."""
    users = Counter(row["user_id"] for row in wanted.rows)
    return next(i for i, row in enumerate(wanted.rows) if users[row["user_id"]] == 1 and row["uih_item_id"])


def test_the_page_shows_names_of_the_best_items(ranker, tmp_path):
    wanted = predicted(ranker, tmp_path, 40)
    place = only_row(wanted)
    row, answer = wanted.rows[place], wanted.answers[place]
    page = page_flags(tmp_path, sorted({*answer["candidate_item_id"], *row["uih_item_id"]}))
    with serving(ranker.package, *page) as running:
        empty = running.client.get("/")
        assert empty.headers["content-type"].startswith("text/html")
        assert not Tables(empty.text).tables and Tables(empty.text).tags["form"] == 1
        shown = Tables(running.client.get("/", params={"user": row["user_id"]}).text)
        nobody = running.client.get("/", params={"user": NASTY})
    order = sorted(range(len(answer["is_click"])), key=lambda i: -answer["is_click"][i])
    head, *cells = shown.tables["items"]
    assert head == ["item", "name", "is_click", "long_view", "is_like", "watch_time"]
    assert [line[:2] for line in cells] == [
        [str(answer["candidate_item_id"][i]), f"{NASTY} {answer['candidate_item_id'][i]}"] for i in order
    ]
    assert [float(line[2]) for line in cells] == pytest.approx(
        [answer["is_click"][i] for i in order], rel=1e-3
    )
    newest = row["uih_item_id"][::-1][:20]
    assert shown.tables["history"][1:] == [[str(item), f"{NASTY} {item}"] for item in newest]
    assert shown.texts["model"].startswith("step-40-") and not shown.tags["script"]
    assert nobody.status_code == 404
    assert Tables(nobody.text).texts["error"] == f"There is no row of user {NASTY}."
    assert not Tables(nobody.text).tags["script"]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome")
def test_a_browser_shows_what_the_page_says(ranker, tmp_path):
    """The document that a browser makes of the page has the tables of its text, and nothing else became of
    names. In the browser's own form, the user is chosen and the button is there."""
    wanted = predicted(ranker, tmp_path, 40)
    row = wanted.rows[only_row(wanted)]
    page = page_flags(tmp_path, sorted(set(row["uih_item_id"])))
    with serving(ranker.package, *page) as running:
        url = f"{running.client.base_url}?user={row['user_id']}"
        said = Tables(running.client.get(url).text)
        flags = ("--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom")
        done = subprocess.run([BROWSER, *flags, url], capture_output=True, text=True, check=True, timeout=60)
    shown = Tables(done.stdout)
    assert shown.tables == said.tables and len(shown.tables) == 2
    assert [line[1] for line in shown.tables["history"][1:]] == [
        f"{NASTY} {item}" for item in row["uih_item_id"][::-1][:20]
    ]
    assert shown.texts == said.texts
    assert not shown.tags["script"] and shown.tags["form"] == shown.tags["button"] == shown.tags["input"] == 1


def test_flags_that_do_not_go_together_are_refused(ranker, retriever, twins, tmp_path):
    a, b = ("--package", twins / "a"), ("--package", twins / "b")
    names = tmp_path / "names.csv"
    names.write_text("item,title\n1,a\n")
    secret = tmp_path / "token"
    secret.write_text("abc")
    page = ("--page-rows", ranker.rows)
    for flags, said in (
        ((*a, *b), "--share: give it with two packages"),
        ((*a, "--share", 0.5), "--share: give it with two packages"),
        ((*a, *b, *a, "--share", 0.5), "3 packages are given; give one, or two"),
        ((*a, *b, "--share", 1.5), "'1.5' is not a number from 0 to 1"),
        ((*a, "--item-names", names), "give --page-rows"),
        ((*a, "--user-store-folder-mib", 5), "give --user-store-folder"),
        ((*a, *page, "--token-file", secret), "a browser sends no token"),
    ):
        assert said in command("serve", *flags, "--port", 0, code=2)
    # These are said when the packages are loaded.
    for flags, code, said in (
        ((*a, "--user-store-mib", 5), 2, "export it with export.cached_scoring: true"),
        ((*a, *page, "--item-names", names), 3, "it needs the columns `id` and `name`, and has item, title"),
        ((*a, "--package", retriever.package, "--share", 0.5), 2, "read different rows"),
    ):
        assert said in said_by_serve(*flags, code=code)
    assert pq.read_table(ranker.rows).num_rows > 0
