"""The page, read back with an HTML parser: numbers, self-containment, and runs that have only begun."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from synthetic_run import write_synthetic_run

from pnpo_megatron.analysis.report import build_page, labels, main
from pnpo_megatron.analysis.run_folder import read_run
from pnpo_megatron.analysis.series import LONGEST, Line, by_lag, rejected_by_epoch_and_position, thinned
from pnpo_megatron.errors import DataError


class Page(HTMLParser):
    """Tables as rows of (text, data-value), every tag with its attributes, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.rows = self.tables.setdefault(dict(attrs)["id"], [])
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(("", dict(attrs).get("data-value")))
            self.cell = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.cell = False

    def handle_data(self, data):
        self.text.append(data)
        if self.cell:
            shown, value = self.rows[-1][-1]
            self.rows[-1][-1] = (shown + data, value)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [
        write_synthetic_run(folder / "four", steps=10),
        write_synthetic_run(folder / "one", steps=20, epochs=1, name="grpo", seed=1, dumps=False),
    ]


@pytest.fixture(scope="module")
def page(runs):
    return build_page([read_run(run) for run in runs])


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def same(cell, expected):
    shown, value = cell
    return float(value) == expected and float(shown) == pytest.approx(expected, rel=1e-5)


def test_every_newest_value_equals_the_last_row_of_metrics_jsonl(runs, page):
    header, *table = Page(page).tables["newest"]
    assert [shown for shown, _ in header] == ["metric", "four", "one"]
    assert len(table) > 30
    for (key, _), *cells in table:
        for cell, run in zip(cells, runs, strict=True):
            kind = "eval" if key.startswith("eval/") else "update"
            values = [row[key] for row in rows_of(run) if row["kind"] == kind and key in row]
            assert same(cell, values[-1]) if values else cell == ("-", None), (key, cell)


def test_every_evaluation_equals_its_row_of_metrics_jsonl(runs, page):
    header, *table = Page(page).tables["evaluations"]
    expected = [(run.name, row) for run in runs for row in rows_of(run) if row["kind"] == "eval"]
    for cells, (name, row) in zip(table, expected, strict=True):
        assert cells[0][0] == name
        for (column, _), cell in zip(header[1:], cells[1:], strict=True):
            key = column if column in ("step", "update") else f"eval/{column}"
            assert same(cell, row[key]) if key in row else cell == ("-", None)


def test_only_settings_that_differ_are_listed_and_folders_are_not(page):
    table = Page(page).tables["settings"]
    rows = {cells[0][0]: [shown for shown, _ in cells[1:]] for cells in table[1:]}
    assert rows == {"steps": ["10", "20"], "objective.epochs": ["4", "1"], "objective.name": ["pnpo", "grpo"]}


def test_the_page_is_small_and_asks_for_nothing(page):
    assert len(page.encode()) < 1_000_000
    for tag, attributes in Page(page).tags:
        assert tag not in ("script",) or "src" not in attributes
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:,")), (tag, value)
    assert set(re.findall(r"\w+://[^\"'\s]*", page)) == {
        "http://www.w3.org/1999/xlink",
        "http://www.w3.org/2000/svg",
    }
    assert re.findall(r"url\((?!#)|@import", page) == []
    assert "default-src 'none'" in page


def test_pictures_have_unique_ids_a_description_and_colours_of_the_theme(page):
    parsed = Page(page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    pictures = [attributes for tag, attributes in parsed.tags if tag == "svg"]
    assert len(pictures) > 12
    assert all(picture["aria-label"] for picture in pictures)
    body = page[page.index("<body>") :]
    assert re.findall(r"#[0-9a-f]{6}\b", body) == []
    used = set(re.findall(r"var\((--\w+)\)", page))
    for theme in re.findall(r":root \{(.*?)\}", page, re.DOTALL):
        assert used - {"--page", "--card"} <= set(re.findall(r"(--\w+):", theme))


@pytest.mark.parametrize("rows", [0, 1])
def test_a_run_that_has_only_begun_gives_a_page(tmp_path, rows):
    run = write_synthetic_run(tmp_path / "run", steps=1, dumps=False)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:rows]) + '{"kind": "upda')
    (run / "config.toml").unlink()
    text = " ".join(Page(build_page([read_run(run)])).text)
    assert "No evaluation yet." in text
    assert ("no update yet" in text) == (rows == 0)


def test_names_cannot_smuggle_markup_into_the_page(tmp_path):
    run = write_synthetic_run(tmp_path / "<img src=x onerror=alert(1)>", steps=5, dumps=False)
    evaluation = rows_of(run)[-1] | {"eval/<b onload='x'>/avg_at_k": 0.5}
    (run / "metrics.jsonl").write_text(json.dumps(evaluation) + "\n")
    text = build_page([read_run(run)])
    assert "&lt;img" in text
    assert "&lt;b onload" in text
    assert not {tag for tag, _ in Page(text).tags} & {"img", "b"}


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path):
    runs = [read_run(write_synthetic_run(tmp_path / part / "run", steps=1, dumps=False)) for part in "ab"]
    assert labels(runs) == [str(tmp_path / "a" / "run"), str(tmp_path / "b" / "run")]


def test_the_command_writes_the_page_into_the_first_run_or_where_it_is_told(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    out = tmp_path / "new" / "page.html"
    main([str(tmp_path / "run")])
    main([str(tmp_path / "run"), "--out", str(out)])
    assert (tmp_path / "run" / "report.html").read_text() == out.read_text()
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "run" / "report.html"), str(out)]
    with pytest.raises(DataError, match=r"metrics\.jsonl: no such file"):
        main([str(tmp_path)])


def test_the_heat_map_holds_means_by_epoch_and_position(runs):
    heat = rejected_by_epoch_and_position(read_run(runs[0]))
    assert len(heat) == 4
    key = "gate/rejected_fraction_bin_7"
    values = [row[key] for row in rows_of(runs[0]) if row.get("epoch") == 3]
    assert heat[2][7] == pytest.approx(sum(values) / len(values))


def test_curves_by_lag_average_over_steps():
    rows = [{"lag": lag, "m": step + lag} for step in (0, 10) for lag in (0.0, 1.0)]
    line = by_lag(0, [*rows, {"lag": 1.0, "m": None}], "m")
    assert (line.x, line.y) == ([0.0, 1.0], [5.0, 6.0])


def test_long_curves_are_thinned_by_means():
    line = thinned(Line(0, list(range(1000)), [float(value % 2) for value in range(1000)]))
    assert len(line.x) <= LONGEST
    assert line.x[0] == pytest.approx(1.0)  # 0, 1, 2
    assert sum(line.y) / len(line.y) == pytest.approx(0.5, abs=0.01)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_chromium_opens_the_page_without_an_error(page, tmp_path):
    (tmp_path / "page.html").write_text(page)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-sync",
        "--disable-component-update",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/profile",
    ]
    click = "<script>document.querySelector('button').click()</script></body>"
    (tmp_path / "page.html").write_text(page.replace("</body>", click))
    command = ["chromium", *flags, "--dump-dom", f"file://{tmp_path}/page.html"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in result.stderr
    assert re.search(r"copied|copying was refused", result.stdout[result.stdout.index("<body>") :])
