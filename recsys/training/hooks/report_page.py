"""Builds the HTML of `report.html`: a self-contained page, styled for light, dark and print."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple


class Share(NamedTuple):
    """An activity and its time in seconds, for `share_bar`."""

    name: str
    seconds: float


class Tile(NamedTuple):
    """A big number for `tiles`: its name, its value and a short remark, all plain text."""

    name: str
    value: str
    about: str


def page(title: str, parts: Sequence[str]) -> str:
    """Returns a whole document; `title` is plain text, `parts` are HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str, note: str = "") -> str:
    """Returns a section with a heading; `title` and `note` are plain text, `body` is HTML."""
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{told}{body}\n</section>"


def grid(figures: Sequence[str]) -> str:
    """Places charts side by side, as many as fit the window."""
    return '<div class="grid-of-charts">\n' + "\n".join(figures) + "\n</div>"


def card(body: str) -> str:
    """Puts HTML into a card."""
    return f'<div class="card">{body}</div>'


def tiles(facts: Sequence[Tile]) -> str:
    """Places a few big numbers in a row."""
    cells = (
        f'<div class="tile"><span>{escape(name)}</span><strong>{escape(value)}</strong>'
        f"<small>{escape(about)}</small></div>"
        for name, value, about in facts
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def folded(title: str, body: str) -> str:
    """Folds HTML until a click, without a script; `title` is plain text."""
    return f"<details><summary>{escape(title)}</summary>\n{body}\n</details>"


def facts_table(facts: Mapping[str, str]) -> str:
    """Returns a table of names and values; both are plain text."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def share_bar(shares: Sequence[Share]) -> str:
    """Draws the shares of the total time as one bar, with a table of durations and percentages."""
    total = sum(share.seconds for share in shares) or 1.0
    bars, rows = [], []
    for place, (name, seconds) in enumerate(shares):
        percent = 100 * seconds / total
        bars.append(f'<i class="s{place}" style="width:{percent:.2f}%" title="{escape(name)}"></i>')
        rows.append(
            f'<tr><th><i class="s{place} swatch"></i>{escape(name)}</th>'
            f'<td class="n">{clock(seconds)}</td><td class="n">{percent:.1f} %</td></tr>'
        )
    table = f'<table class="shares"><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="sharebar">{"".join(bars)}</div>{table}'


def clock(seconds: float) -> str:
    """Formats a duration: "8.3 s", "2 min 05 s", "3 h 20 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


_STYLE = """
:root {
  --page: #f6f7f9; --card: #fff; --ink: #1c2330; --soft: #626d7d; --line: #dfe4eb; --hair: #e9edf2;
  --c0: #2f6fde; --c1: #e0701a; --c2: #12907f; --c3: #9a4fd6; --c4: #d6336c; --c5: #7a8596;
}
@media (prefers-color-scheme: dark) { :root {
  --page: #12151b; --card: #1a1f28; --ink: #e4e8ee; --soft: #93a0b2; --line: #323b49; --hair: #29313d;
  --c0: #79a9ff; --c1: #f5a35c; --c2: #4fd0b9; --c3: #c79bff; --c4: #ff85ab; --c5: #a3afc0;
} }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.s3 { --c: var(--c3); } .s4 { --c: var(--c4); } .s5 { --c: var(--c5); }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 64px; }
header h1 { margin: 0; font-size: 27px; line-height: 1.2; letter-spacing: -.015em; overflow-wrap: anywhere; }
header p { margin: 6px 0 0; color: var(--soft); }
h2 { font-size: 17px; margin: 40px 0 12px; letter-spacing: -.005em; }
h2 + .note { margin-top: -8px; }
.note, .empty { color: var(--soft); font-size: 13.5px; margin: 0 0 12px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; }
.tiles { margin-top: 24px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 16px; display: flex; flex-direction: column; min-width: 0; }
.tile span, .tile small { color: var(--soft); font-size: 12.5px; overflow-wrap: anywhere; }
.tile strong { font-size: 23px; font-weight: 600; letter-spacing: -.01em; }
.grid-of-charts, .two { display: grid; gap: 12px; }
.grid-of-charts { grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }
figure { margin: 0; padding: 12px 14px 8px; min-width: 0; }
figcaption { font-size: 12.5px; display: flex; flex-wrap: wrap; gap: 1px 13px; align-items: baseline; }
figcaption b { font-size: 13.5px; width: 100%; font-weight: 600; overflow-wrap: anywhere; }
.key { color: var(--soft); white-space: nowrap; }
.about { color: var(--soft); overflow-wrap: anywhere; }
.key em { font-style: normal; color: var(--ink); font-variant-numeric: tabular-nums; }
.key i, .swatch { display: inline-block; width: 9px; height: 9px; border-radius: 3px; background: var(--c);
  margin-right: 5px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.curve { fill: none; stroke: var(--c); stroke-width: 1.7; stroke-linejoin: round; stroke-linecap: round; }
.dashed { stroke-dasharray: 5 4; }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 1.2; }
.hint { fill: var(--c); opacity: 0; }
.hint:hover, .dot:hover { opacity: 1; stroke: var(--ink); }
.grid { stroke: var(--hair); } .axis { stroke: var(--line); }
.best { stroke: var(--soft); stroke-dasharray: 2 3; }
.tick { fill: var(--soft); font-size: 10.5px; font-variant-numeric: tabular-nums; }
.card { padding: 6px 16px; overflow-x: auto; }
.slices td:first-of-type { position: sticky; left: -16px; background: var(--card); }
table { border-collapse: collapse; font-size: 13.5px; width: 100%; }
th { font-weight: 400; text-align: left; }
thead th { color: var(--soft); font-size: 12.5px; }
th, td { padding: 6px 16px 6px 0; border-bottom: 1px solid var(--hair); vertical-align: middle; }
tbody tr:last-child > * { border-bottom: 0; }
.metrics th.group { font-weight: 600; vertical-align: top; width: 11em; }
.metrics tbody + tbody tr:first-child > * { border-top: 1px solid var(--line); }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.metrics .n { width: 10em; }
.metrics td.main { font-weight: 600; }
.decides { color: var(--soft); font-size: 12px; margin-left: 6px; }
.metrics th:last-child, .metrics td:last-child { padding: 3px 0 3px 24px; width: 150px; }
.spark { width: 120px; height: 24px; }
.shares { width: auto; min-width: min(100%, 26rem); }
.facts th { color: var(--soft); width: 11em; } .facts td { overflow-wrap: anywhere; }
.slices small { display: block; font-size: 11.5px; white-space: nowrap; }
.slices th.group { font-weight: 600; vertical-align: top; }
.slices tbody + tbody tr:first-child > * { border-top: 1px solid var(--line); }
details { margin: 8px 0; }
summary { color: var(--soft); font-size: 13.5px; cursor: pointer; }
.two { grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); }
.sharebar { display: flex; height: 18px; border-radius: 5px; overflow: hidden; margin: 12px 0 8px; gap: 1px; }
.sharebar i { background: var(--c); min-width: 1px; }
pre { margin: 0; padding: 10px 0; font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
  max-height: 34rem; overflow: auto; tab-size: 2; }
@media (max-width: 560px) {
  main { padding: 20px 12px 40px; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); }
  .card:has(> .slices) { box-shadow: inset -18px 0 14px -14px var(--soft); }
  th, td { padding-right: 10px; } .metrics .n, .metrics th.group, .facts th { width: auto; }
}
@media print { pre { max-height: none; } main { padding: 0; } figure, .tile, .card { break-inside: avoid; } }
"""
