"""Puts the tables of bench/results/*.json into docs/PERFORMANCE.md, between its markers.

python bench/write_tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from measure import RESULTS, Bound, table

PAGE = Path(__file__).parents[1] / "docs" / "PERFORMANCE.md"


def filled(name: str) -> str:
    """Table, bounds and machine of one result, or that there is none."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return "Not measured yet."
    result = json.loads(path.read_text())
    lines = [table(result["rows"]), ""]
    for entry in result["bounds"]:
        bound = Bound(entry["what"], entry["measured"], entry["limit"])
        verdict = "holds" if bound.holds else "**does not hold**"
        lines.append(f"- {bound.what}: {bound.measured:.3g}, at most {bound.limit:.3g}: {verdict}")
    machine = result["machine"]
    lines += [
        "",
        f"Measured on {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}, "
        f"{machine['threads']} thread, load average {machine['load_average']:.0f} at the end.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Rewrite the page."""
    text = PAGE.read_text()
    pattern = re.compile(r"<!-- table (\w+) -->.*?<!-- end -->", re.DOTALL)
    page = pattern.sub(lambda match: f"<!-- table {match[1]} -->\n{filled(match[1])}\n<!-- end -->", text)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
