"""The report's HTML: one file, nothing fetched, readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --page: #ffffff; --card: #f5f6f8; --ink: #1c2026; --faint: #8a929d;
  --s0: #1f6fb4; --s1: #c2500a; --s2: #2a8a4a; --s3: #8a4fb0; --s4: #b3243f; --s5: #0f8a96; --s6: #7a6a10;
  --s7: #64707d; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #14171b; --card: #1d2127; --ink: #e6e9ed; --faint: #7d8794;
    --s0: #6cb2f0; --s1: #f2955c; --s2: #6fcf8e; --s3: #c79bea; --s4: #f2788d; --s5: #5fd0da; --s6: #d3c257;
    --s7: #a9b4c0; }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 1rem/1.45 system-ui, sans-serif; }}
h1, h2, li {{ overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; margin: 0.2rem 0; }}
h2 {{ font-size: 1.15rem; margin: 1.6rem 0 0.6rem; }}
p, ul {{ margin: 0.3rem 0; }}
ul {{ list-style: none; padding: 0; }}
.swatch {{ display: inline-block; width: 1.2rem; height: 0.25rem; margin: 0 0.5rem 0.25rem 0; }}
.grid {{ display: grid; gap: 0.8rem;
  grid-template-columns: repeat(auto-fill, minmax(min(21rem, 100%), 1fr)); }}
figure {{ margin: 0; padding: 0.7rem; background: var(--card); border-radius: 0.5rem; }}
figcaption {{ font-size: 0.85rem; margin-bottom: 0.4rem; }}
figure svg {{ display: block; width: 100%; height: auto; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.25rem 0.6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid color-mix(in srgb, var(--faint) 35%, transparent); }}
th:first-child, td:first-child {{ text-align: left; }}
button {{ font: inherit; padding: 0.3rem 0.8rem; margin: 0.4rem 0; border: 1px solid var(--faint);
  border-radius: 0.4rem; background: var(--card); color: var(--ink); }}
</style>
</head>
<body>
"""
_FOOT = """<script>
for (const button of document.querySelectorAll("button[data-copies]")) {
  button.addEventListener("click", () => {
    const rows = [...document.getElementById(button.dataset.copies).rows];
    const value = cell => cell.dataset.value ?? cell.textContent;
    const text = rows.map(row => [...row.cells].map(value).join("\\t"));
    const area = document.createElement("textarea");
    area.value = text.join("\\n");
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    button.textContent = copied ? "copied" : "copying was refused";
  });
}
</script>
</body>
</html>
"""


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document; `title` is plain text, `parts` are HTML."""
    return _HEAD.format(title=escape(title)) + "\n".join(parts) + "\n" + _FOOT


def heading(text: str, level: int = 2) -> str:
    """A heading of plain text."""
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def legend(lines: Sequence[str]) -> str:
    """A list of plain texts, each with the colour of its run in the plots."""
    swatch = '<span class="swatch" style="background: var(--s{color})"></span>'
    items = (f"<li>{swatch.format(color=index % 8)}{escape(line)}</li>" for index, line in enumerate(lines))
    return "<ul>" + "".join(items) + "</ul>"


def figure(caption: str, svg: str) -> str:
    """A plot with its caption, which screen readers take for the picture as well."""
    picture = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption, quote=True)}" ', 1)
    return f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def grid(figures: Sequence[str]) -> str:
    """Figures side by side where there is room."""
    return '<div class="grid">' + "\n".join(figures) + "</div>"


def table(name: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with a button that copies it, tab-separated.

    Numbers are shown to six digits; the cell's ``data-value`` and the copy carry them in full. None is "-".
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>\n" for row in rows)
    button = f'<button type="button" data-copies="{name}">copy table</button>'
    content = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>"
    return f'{button}\n<div class="scroll"><table id="{name}">{content}</table></div>'


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{'-' if value is None else escape(str(value))}</td>"
    return f'<td data-value="{value!r}">{value:.6g}</td>'
