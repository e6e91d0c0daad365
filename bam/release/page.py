"""A page about one run: a single file that a browser shows without network and without scripts.

What it says of privacy is the statement of a release, word by word.
"""

import contextlib
import dataclasses
import json
import math
import shlex
from pathlib import Path

import numpy as np

from bam.extras import needs
from bam.files import JsonObject, one_line
from bam.privacy import statement
from bam.release import export, plots
from bam.release.plots import Chart
from bam.release.records import NOT_PRIVATE, RECORDED, Run
from bam.training import config as base
from bam.training import methods
from bam.training.rundir import as_json, divergence, flat

with needs("train"):
    import jinja2
    from markdown_it import MarkdownIt

MOST_SHOWN = 30  # classes in a picture

# Of Markdown what `statement` writes, and no more: a record that looks like a link stays a text.
_RULES = ["heading", "fence", "list", "table", "backticks", "emphasis"]
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["markdown"] = MarkdownIt("zero").enable(_RULES).render
_TEMPLATES.filters |= {"rounded": statement.rounded, "svg": plots.svg}


def page(run: Run, *, public: bool, made_by: str) -> str:
    """The page's HTML; `made_by`: version and commit of the code.

    A public one leaves out everything that was computed from data and is not covered by ε, and
    every setting that a release does not state.
    """
    about = methods.label(one_line(run.config["method"]["name"]))
    if run.summary:
        about += f" on {export.data_in_words(run).replace('`', '')}"
    # ε tells of the steps that the plan pays for, or so far of those begun.
    counted = run.plan.num_steps if run.summary or not run.private else run.begun
    is_stated = run.private and all(key in run.summary for key in RECORDED)
    # What is left out is nowhere in what the template can show.
    config = export.settings(run) if public else run.config
    shown = dataclasses.replace(run, config=config, rows=[]) if public else run
    command, missing = command_of(config)
    epsilon = run.plan.epsilon_after(counted) if run.private else math.inf
    return _TEMPLATES.get_template("report.html").render(
        run=shown,
        public=public,
        title=one_line(about if public else run.workdir.resolve().name),
        about=about,
        plots_missing=plots.MISSING,
        epsilon=epsilon,
        nominal=statement.nominal_notice(epsilon) if run.private and run.nominal else "",
        diverged="" if public else divergence(run.summary),
        faults=list(run.faults()) if run.private and run.summary else [],
        attacker=attacker_charts(run, counted) if run.private and counted else [],
        tests=None if public else _tests(run.summary),
        accuracy=_measured(shown, "test_accuracy"),
        measured=_measured(shown, NOT_PRIVATE),
        statement=export.statement_of(run, made_by, "the weights") if is_stated else "",
        settings=json.dumps(config, indent=1, ensure_ascii=False),
        command=command,
        missing=one_line(missing),
        made_by=made_by,
    )


def attacker_charts(run: Run, counted: int) -> list[Chart]:
    """What the weights leave to an attacker after so many steps, and ε over the steps."""
    plan = run.plan
    steps = sorted({round(plan.num_steps * i / 12) for i in range(13)} | {counted})
    spent = [plan.epsilon_after(step) for step in steps]
    at = steps.index(counted)
    over_steps = {"by the plan" if run.summary else "spent": (steps[: at + 1], spent[: at + 1])}
    if counted < plan.num_steps:
        over_steps["still planned"] = steps[at:], spent[at:]
    rates = [10 ** (i / 20 - 3) for i in range(61)]
    limits = {"ε and δ alone": lambda rate: statement.most_power(spent[at], plan.delta, rate)}
    if own := statement.own_power(plan, counted):
        limits = {"this training": own, **limits}
    lines = {name: (rates, [power(rate) for rate in rates]) for name, power in limits.items()}
    lines["guessing"] = rates, rates
    recognised = "Participants that an attacker recognises, at most"
    return [
        Chart(recognised, "non-participants accused", lines, plots.SHARE, plots.SHARE),
        Chart("ε over training", "steps begun", over_steps),
    ]


def _measured(run: Run, beginning: str) -> list[Chart]:
    """A chart of each measurement whose name begins so."""
    charts = []
    for key in sorted({key for row in run.rows for key in row if key.startswith(beginning)}):
        steps, values = zip(
            *((row["step"], row[key]) for row in run.rows if key in row), strict=True
        )
        name = in_words(key.removeprefix(NOT_PRIVATE))
        form = plots.SHARE if key.endswith("accuracy") else plots.NUMBER
        charts.append(Chart(name, "step", {name: (steps, values)}, form))
    return charts


def in_words(name: str) -> str:
    """A figure's name for readers: "Test accuracy" for "test_accuracy"."""
    words = name.replace("_", " ").replace("auroc", "AUROC")
    return {"r2": "R²"}.get(words, words[:1].upper() + words[1:])


def _tests(summary: JsonObject) -> JsonObject | None:
    """The figures of test data that a summary has; of the lowest classes if there are many.

    A stranger's entries that are no figures are left out.
    """
    recorded = summary.get("figures")
    if not isinstance(recorded, dict):
        return None
    whole: JsonObject = {}
    members: dict[str, JsonObject] = {}
    for name, interval in recorded.items():
        figure, slash, member = name.partition("/")
        if interval is None and slash:  # a class without test images
            members.setdefault(figure, {})[member] = None
        with contextlib.suppress(TypeError, ValueError):
            value, low, high = map(float, interval)
            shown = value, low, high
            if slash:
                members.setdefault(figure, {})[member] = shown
            else:
                form = "{:.1f} %".format if figure.endswith("accuracy") else "{:.4g}".format
                factor = 100 if figure.endswith("accuracy") else 1
                whole[in_words(name)] = [form(factor * x) for x in shown]
    charts = {}
    each_is = "label" if summary.get("loss") == "binary" else "class"
    for figure, each in members.items():
        order = sorted(each, key=lambda x: each[x] or ())  # those without test images first
        cut = f", the {MOST_SHOWN} lowest of {len(each)}" if len(each) > MOST_SHOWN else ""
        charts[f"{in_words(figure)} by {each_is}{cut}"] = {
            x: each[x] for x in each if x in order[:MOST_SHOWN]
        }
    names, confusion = [x[7:] for x in recorded if x.startswith("recall/")], np.zeros(0)
    with contextlib.suppress(TypeError, ValueError):
        confusion = np.array(summary.get("confusion"), float)
    if confusion.shape != (len(names),) * 2 or len(names) > MOST_SHOWN:
        names = []
    return {"whole": whole, "charts": charts, "names": names, "confusion": confusion.tolist()}


def command_of(config: JsonObject) -> tuple[str, list[str]]:
    """The command for a recorded config, and its keys that the base config does not have."""
    method = config["method"]["name"]
    file = method if method in base.METHODS else "dp_sgd"
    known = flat(as_json(base.get_config(file)))
    other = {k: v for k, v in flat(config).items() if k not in known or known[k] != v}
    arguments = [f"--config=base:{file}", "--workdir=NEW_FOLDER"]
    arguments += [f"--config.{key}={value}" for key, value in other.items() if key in known]
    quoted = [shlex.quote(argument) for argument in arguments]
    return " \\\n  ".join(["bam train", *quoted]), sorted(other.keys() - known.keys())
