"""The report's HTML: one file, nothing fetched, readable on a phone and in the dark."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

_PAGE = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document; `title` is plain text, `parts` are HTML."""
    return _PAGE.substitute(title=escape(title), body="\n".join(parts))


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
