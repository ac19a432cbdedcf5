"""The report of a bundle: lines for the terminal, and one self-contained HTML page with charts."""

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from recsys.sid.bundle import Bundle
from recsys.sid.statistics import bucket_sizes
from recsys.training.hooks.report_charts import HEIGHT, WIDTH, Axis, number
from recsys.training.hooks.report_page import Tile, card, facts_table, grid, page, section, tiles

_LEFT, _TOP, _BOTTOM = 44, 10, 24
_MOST_SIZES = 24
"""Most bars of the chart of shared codes; the last bar joins all larger groups."""

_MOST_SHARED = 10
"""Number of codes with the most items that the page lists."""


def lines(bundle: Bundle) -> list[str]:
    """Returns the report as lines, each with a name and its value."""
    about, codes = bundle.about, bundle.about.codes
    rows = [
        ("quantizer", f"{about.quantizer}, {len(codes.levels)} codes of {about.size}"),
        ("version", str(about.version)),
        ("items", f"{codes.items:,}"),
        ("items with their own code", percent(codes.alone)),
        ("distinct codes / items", percent(codes.distinct)),
        ("items unique with the digit", percent(codes.unique)),
        ("shared codes", f"{codes.shared:,}, the largest by {codes.largest:,} items"),
        ("reconstruction error", f"{about.kept.error:.4f} of the squared length"),
        ("nearest 10 kept by decoding", percent(about.kept.recall)),
        *_neighbour_rows(bundle),
    ]
    width = max(len(name) for name, _ in rows)
    table = [f"{name:<{width}}  {value}" for name, value in rows]
    table.append(f"{'level':<7}{'entropy, bits':>14}{'perplexity':>12}{'dead':>6}{'largest':>9}")
    for place, level in enumerate(codes.levels, start=1):
        table.append(
            f"{place:<7}{level.entropy:>14.3f}{level.perplexity:>12.1f}{level.dead:>6}{level.largest:>9,}"
        )
    return table


def _neighbour_rows(bundle: Bundle) -> list[tuple[str, str]]:
    names = ["nearest 10 share a code"]
    if bundle.about.ordered:
        names = [
            f"nearest 10 share {place} code{'s' * (place > 1)}"
            for place in range(1, bundle.codes.shape[1] + 1)
        ]
    pairs = zip(names, bundle.about.kept.neighbours, bundle.about.kept.chance, strict=True)
    return [(name, f"{percent(share)}, any two items {percent(chance)}") for name, share, chance in pairs]


def percent(share: float) -> str:
    """Writes a share in percent with two decimals."""
    return f"{100 * share:.2f} %"


def build(bundle: Bundle, name: str) -> str:
    """Returns the page as HTML; `name` is the name of the bundle's folder."""
    about, codes = bundle.about, bundle.about.codes
    dead = sum(level.dead for level in codes.levels)
    made = f"{about.quantizer}, {len(codes.levels)} codes of {about.size}"
    told = f"{made} for {codes.items:,} items, version {about.version}."
    facts = [
        Tile("with their own code", percent(codes.alone), "of the items, before the extra digit"),
        Tile("unique with the digit", percent(codes.unique), "of the items"),
        Tile(
            "perplexity",
            number(min(level.perplexity for level in codes.levels)),
            f"lowest level, of {about.size}",
        ),
        Tile("dead codes", f"{dead:,}", "in all levels"),
        Tile("reconstruction error", number(about.kept.error), "of the squared length"),
        Tile("neighbours kept", percent(about.kept.recall), "of the nearest 10, by decoded vectors"),
    ]
    head = f"<header><h1>{escape(name)}</h1><p>{escape(told)}</p></header>" + tiles(facts)
    usage = [_usage_chart(bundle, level) for level in range(bundle.codes.shape[1])]
    kept = "" if about.version == 1 else f" Measured on the {about.kept.items:,} items of version 1."
    note = (
        "Share of an item's nearest 10 (by cosine) that share codes with it, beside the share of all pairs."
        + kept
    )
    shared = section(
        "Items that share a code", grid([_collision_chart(bundle)]) + card(_shared_table(bundle))
    )
    settings = {key: str(value) for key, value in about.settings.items()}
    hashes = {"ids": about.ids, "transform": about.transform}
    return page(
        f"{name} – semantic ids",
        [
            head,
            section(
                "Use of the codes", grid(usage), "Items per code, most frequent first; dashed: uniform use."
            ),
            section("Levels", card(_level_table(bundle))),
            shared,
            section("Neighbours", card(facts_table(dict(_neighbour_rows(bundle)))), note),
            section("Settings", card(facts_table({**settings, **hashes}))),
        ],
    )


def _usage_chart(bundle: Bundle, level: int) -> str:
    size = bundle.about.size
    counts = np.sort(np.bincount(bundle.codes[:, level], minlength=size))[::-1]
    level_statistics = bundle.about.codes.levels[level]
    about = f"perplexity {number(level_statistics.perplexity)}, {level_statistics.dead} dead"
    labels = [f"rank {place}: {count:,} items" for place, count in enumerate(counts.tolist(), start=1)]
    return bar_chart(
        f"level {level + 1}", about, counts.tolist(), labels, ends=("1", str(size)), even=counts.mean()
    )


def _collision_chart(bundle: Bundle) -> str:
    sizes = np.bincount(np.minimum(bucket_sizes(bundle.codes), _MOST_SIZES), minlength=2)[1:]
    joined = " or more" if len(sizes) == _MOST_SIZES else ""
    labels = [
        f"{count:,} items share their code with {place - 1}{joined * (place == _MOST_SIZES)} others"
        for place, count in enumerate(sizes.tolist(), start=1)
    ]
    about = "items by how many items share their code"
    return bar_chart("items per code", about, sizes.tolist(), labels, ends=("1", f"{len(sizes)}{joined}"))


def bar_chart(
    title: str,
    about: str,
    values: Sequence[float],
    labels: Sequence[str],
    *,
    ends: tuple[str, str],
    even: float | None = None,
) -> str:
    """Returns a `<figure>` of bars.

    Args:
        title, about: plain text.
        values: heights.
        labels: text that each bar shows under the pointer.
        ends: labels of the first and the last bar.
        even: height of a dashed line.
    """
    y = Axis(0.0, max([*values, even or 0.0]) * 1.04 or 1.0, HEIGHT - _BOTTOM, _TOP)
    step = (WIDTH - _LEFT - 10) / max(len(values), 1)
    parts = []
    for value in y.ticks():
        line = f'x1="{_LEFT}" x2="{WIDTH - 10}" y1="{y.place(value):.1f}" y2="{y.place(value):.1f}"'
        text = f'x="{_LEFT - 7}" y="{y.place(value):.1f}" dy="0.32em" text-anchor="end"'
        parts.append(f'<line class="grid" {line}/><text class="tick" {text}>{value:,.6g}</text>')
    for place, (value, label) in enumerate(zip(values, labels, strict=True)):
        box = f'x="{_LEFT + place * step:.2f}" width="{step * 0.86:.2f}" y="{y.place(value):.2f}"'
        height = y.start - y.place(value)
        hint = f"<title>{escape(label)}</title>"
        parts.append(f'<rect class="s0" fill="var(--c)" {box} height="{height:.2f}">{hint}</rect>')
    if even is not None:
        line = f'x1="{_LEFT}" x2="{WIDTH - 10}" y1="{y.place(even):.1f}" y2="{y.place(even):.1f}"'
        parts.append(f'<line class="best" {line}/>')
    for text, x, anchor in ((ends[0], _LEFT, "start"), (ends[1], WIDTH - 10, "end")):
        place = f'x="{x}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="{anchor}"'
        parts.append(f'<text class="tick" {place}>{escape(text)}</text>')
    head = f'<figcaption><b>{escape(title)}</b><span class="about">{escape(about)}</span></figcaption>'
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )
    return f'<figure class="chart">{head}{svg}</figure>'


def _level_table(bundle: Bundle) -> str:
    heads = ("entropy, bits", "perplexity", "dead codes", "items of the largest")
    rows = [
        (
            f"level {place}",
            number(level.entropy),
            number(level.perplexity),
            f"{level.dead:,}",
            f"{level.largest:,}",
        )
        for place, level in enumerate(bundle.about.codes.levels, start=1)
    ]
    return _table(("", *heads), rows)


def _shared_table(bundle: Bundle) -> str:
    """Returns a table of the codes with the most items, and of some of these items."""
    groups: Mapping[tuple, list] = {}
    sizes = bucket_sizes(bundle.codes)
    for row in np.flatnonzero(sizes > 1).tolist():
        groups.setdefault(tuple(bundle.codes[row].tolist()), []).append(bundle.ids[row])
    largest = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))[:_MOST_SHARED]
    rows = [
        (" ".join(map(str, code)), f"{len(ids):,}", ", ".join(map(str, ids[:5])) + " …" * (len(ids) > 5))
        for code, ids in largest
    ]
    if not rows:
        return '<p class="empty">No two items share a code.</p>'
    return _table(("code", "items", "among them"), rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(
        f"<th{' class=n' if place else ''}>{escape(text)}</th>" for place, text in enumerate(heads)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{' class=n' if place else ''}>{escape(cell)}</td>" for place, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
