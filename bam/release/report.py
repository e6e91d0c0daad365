"""A page about one run: a single HTML file that needs neither network nor scripts.

Its privacy section is the text of `PRIVACY.md`, word for word.
"""

import contextlib
import dataclasses
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from bam.extras import needs
from bam.files import JsonObject
from bam.privacy import statement
from bam.release import charts, export
from bam.release.charts import Chart
from bam.release.records import NOT_PRIVATE, PRIVATE, RECORDED, RunRecords
from bam.text import one_line, plural
from bam.training import config as base
from bam.training import methods
from bam.training.rundir import as_json, divergence, flat

with needs("train"):
    import jinja2
    from markdown_it import MarkdownIt

CLIPPED = f"{PRIVATE}share_clipped"
MOST_CLASSES = 30  # in a chart
FEW = 10  # persons or images; with fewer, a bootstrap says little

# The Markdown that `statement` writes, without links, images and HTML, so that an untrusted
# record that looks like one stays text.
_RULES = ["heading", "fence", "list", "table", "backticks", "emphasis"]
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["markdown"] = MarkdownIt("zero").enable(_RULES).render


def shorten(names: Iterable[str], most: int = 15) -> dict[str, str]:
    """Returns each name with a short form, which is cut in the middle and differs from the others.

    Examples:
      >>> list(shorten(["Pneumonie beidseitig viral", "Pneumonie einseitig viral", "no"]).values())
      ['Pneumonie bei…1', 'Pneumonie ein…2', 'no']
    """
    names = list(names)
    cut = [x if len(x) <= most else f"{x[: most // 2 - 1]}…{x[-(most // 2 + 1) :]}" for x in names]
    ends = [f"…{number}" for number in range(1, len(names) + 1)]
    return {
        name: short if cut.count(short) == 1 else name[: most - len(end)] + end
        for name, short, end in zip(names, cut, ends, strict=True)
    }


_TEMPLATES.filters |= {"rounded": statement.round_claim, "svg": charts.svg, "shorten": shorten}


def page(run: RunRecords, *, public: bool, made_by: str) -> str:
    """Returns the HTML of the page.

    `made_by` has the version and commit of the code. A public page leaves out all that was computed
    from data without being covered by ε, and every setting that a release leaves out.
    """
    if public and run.nominal:  # with the seed, the noise of the norms of gradients can be removed
        told = {key: x for key, x in run.summary.items() if key != "gradient_norms"}
        run = dataclasses.replace(run, summary=told, rows=[])
    about = methods.label(one_line(run.config["method"]["name"]))
    if run.summary:
        about += f" on {export.data_in_words(run).replace('`', '')}"
    # A finished run claims the ε of its whole plan, an unfinished one that of the steps begun.
    counted = run.plan.num_steps if run.summary or not run.private else run.steps_begun
    is_stated = run.private and all(key in run.summary for key in RECORDED)
    # The template gets the public part alone, so that a change of it cannot publish the rest.
    config = export.settings(run) if public else run.config
    visible = dataclasses.replace(run, config=config, rows=[]) if public else run
    command, missing = command_of(config)
    epsilon = run.plan.epsilon_after(counted) if run.private else math.inf
    return _TEMPLATES.get_template("report.html").render(
        run=visible,
        public=public,
        title=one_line(about if public else name_of(run.workdir)),
        about=about,
        charts_missing=charts.MISSING,
        epsilon=epsilon,
        nominal=statement.nominal_notice(epsilon) if run.private and run.nominal else "",
        diverged="" if public else divergence(run.summary),
        faults=list(run.faults()) if run.private and run.summary else [],
        attacker=attacker_charts(run, counted) if run.private and counted else [],
        tests=None if public else _tests(run.summary),
        accuracy=_charts(visible, "test_accuracy"),
        norms=_norm_charts(run) if run.private else [],
        measured=_charts(visible, NOT_PRIVATE),
        statement=export.statement_of(run, made_by, "the weights") if is_stated else "",
        settings=json.dumps(config, indent=1, ensure_ascii=False),
        command=command,
        missing=one_line(missing),
        made_by=made_by,
    )


def name_of(workdir: Path) -> str:
    """Returns the name of a run's folder, after its group's name if it is one seed of several.

    Examples:
      >>> name_of(Path("demo/DP-SGD_C=3/seed0"))
      'DP-SGD C=3, seed 0'
    """
    folder = workdir.resolve()
    seed = re.fullmatch(r"seed(\d+)", folder.name)
    if not (seed and folder.parent.name):
        return folder.name
    return f"{folder.parent.name.replace('_', ' ')}, seed {seed[1]}"


def attacker_charts(run: RunRecords, counted: int) -> list[Chart]:
    """Charts of an attacker's power after `counted` steps, and of ε over the steps."""
    plan = run.plan
    steps = sorted({round(plan.num_steps * i / 12) for i in range(13)} | {counted})
    spent = [plan.epsilon_after(step) for step in steps]
    now = steps.index(counted)
    over_steps = {"by the plan" if run.summary else "spent": (steps[: now + 1], spent[: now + 1])}
    if counted < plan.num_steps:
        over_steps["still planned"] = steps[now:], spent[now:]
    rates = [10 ** (i / 20 - 3) for i in range(61)]
    limits = {"ε and δ alone": lambda rate: statement.most_power(spent[now], plan.delta, rate)}
    if power_of_run := statement.own_power(plan, counted):  # tighter than (ε, δ) alone
        limits = {"this training": power_of_run, **limits}
    lines = {name: (rates, [power(rate) for rate in rates]) for name, power in limits.items()}
    lines["guessing"] = rates, rates
    recognised = "Participants that an attacker recognises, at most"
    return [
        Chart(recognised, "non-participants accused", lines, charts.SHARE, charts.SHARE),
        Chart("ε over training", "steps begun", over_steps),
    ]


def _charts(run: RunRecords, prefix: str) -> list[Chart]:
    """A chart over training for each metric whose name begins with `prefix`."""
    over_training = []
    for key in sorted({key for row in run.rows for key in row if key.startswith(prefix)}):
        steps, values = zip(
            *((row["step"], row[key]) for row in run.rows if key in row), strict=True
        )
        name = in_words(key.removeprefix(NOT_PRIVATE))
        form = charts.SHARE if key.endswith("accuracy") else charts.NUMBER
        over_training.append(Chart(name, "step", {name: (steps, values)}, form))
    return over_training


def _norm_charts(run: RunRecords) -> list[Chart]:
    """Returns charts of the share of clipped gradients and of norms below C.

    A clip without slots has none. ε covers these figures. The norms are those of all steps, or of
    the last row of an unfinished run.
    """
    ends = {"estimate": "", "95 % interval, from": "_low", "95 % interval, to": "_high"}
    clipped = [row for row in run.rows if all(f"{CLIPPED}{x}" in row for x in ends.values())]
    if not clipped:
        return []
    steps = [row["step"] for row in clipped]
    over_steps = {
        label: (steps, [row[CLIPPED + end] for row in clipped]) for label, end in ends.items()
    }
    summary = run.summary.get("gradient_norms")
    shares = summary if isinstance(summary, dict) else _shares_of(clipped[-1])
    above: list[tuple[float, list[float]]] = []
    for name, share in shares.items():
        with contextlib.suppress(TypeError, ValueError, LookupError):
            at = 1.0 if name == "share_clipped" else float(name.removeprefix("share_above_"))
            point = 100 * at, [float(share[i]) for i in range(3)]
            if math.isfinite(sum(point[1], point[0])):
                above.append(point)
    found = [Chart("Gradients clipped", "step", over_steps, charts.SHARE)]
    if above:
        norms, values = zip(*sorted(above), strict=True)
        curves = {label: (norms, [x[i] for x in values]) for i, label in enumerate(ends)}
        when = "over all steps" if run.summary else f"in step {steps[-1]:.0f}"
        title = f"Gradients of at least a norm, {when}"
        found.append(Chart(title, "norm, % of C", curves, charts.SHARE))
    return found


def _shares_of(row: Mapping[str, float]) -> JsonObject:
    """The shares in a row of metrics, with their intervals."""
    names = [key for key in row if key.startswith(PRIVATE) and f"{key}_low" in row]
    return {
        key.removeprefix(PRIVATE): [row.get(f"{key}{end}") for end in ("", "_low", "_high")]
        for key in names
    }


def in_words(name: str) -> str:
    """A metric's name for readers: "Test accuracy" for "test_accuracy"."""
    words = name.replace("_", " ").replace("auroc", "AUROC")
    return {"r2": "R²"}.get(words, words[:1].upper() + words[1:])


def _tests(summary: JsonObject) -> JsonObject | None:
    """Returns the metrics on test data in a summary.

    With many classes, only those of the lowest are returned. Entries of another form, in
    an untrusted summary, are left out.
    """
    recorded = summary.get("figures")
    if not isinstance(recorded, dict):
        return None
    overall: JsonObject = {}
    members: dict[str, JsonObject] = {}
    drawn, number = _drawn_units(summary)
    for name, interval in recorded.items():
        figure, slash, member = name.partition("/")
        if interval is None and slash:  # a class without test images
            members.setdefault(figure, {})[member] = None
        with contextlib.suppress(TypeError, ValueError):
            value, low, high = map(float, interval)
            # The draws of few units, or draws that are all alike, do not show how sure a figure is.
            is_telling = number >= FEW and low < high
            if slash:
                members.setdefault(figure, {})[member] = (value, *(low, high) * is_telling)
            else:
                form = "{:.1f} %".format if figure.endswith("accuracy") else "{:.4g}".format
                factor = 100 if figure.endswith("accuracy") else 1
                ends = f"{form(factor * low)} to {form(factor * high)}"
                overall[in_words(name)] = [
                    form(factor * value),
                    ends if is_telling else "says little",
                ]
    bars = {}
    each_is = "label" if summary.get("loss") == "binary" else "class"
    for figure, each in members.items():
        order = sorted(each, key=lambda x: each[x] or ())  # None, without test images, first
        cut = f", the {MOST_CLASSES} lowest of {len(each)}" if len(each) > MOST_CLASSES else ""
        bars[f"{in_words(figure)} by {each_is}{cut}"] = {
            x: each[x] for x in each if x in order[:MOST_CLASSES]
        }
    names, confusion = [x[7:] for x in recorded if x.startswith("recall/")], np.zeros(0)
    with contextlib.suppress(TypeError, ValueError):
        confusion = np.array(summary.get("confusion"), float)
    if confusion.shape != (len(names),) * 2 or len(names) > MOST_CLASSES:
        names = []
    tables: JsonObject = {"overall": overall, "charts": bars, "names": names}
    return tables | {"confusion": confusion.tolist(), "drawn": drawn, "few": FEW}


def _drawn_units(summary: JsonObject) -> tuple[str, float]:
    """Returns the units that the intervals draw, in words, and their number.

    The number is ∞ if it is not recorded.
    """
    recorded = summary.get("intervals_draw")
    if isinstance(recorded, dict) and type(number := recorded.get("number")) is int:
        if recorded.get("unit") == "user":
            return (
                f"{plural(number, 'person')} of the test set, with all images of each",
                number,
            )
        return plural(number, "test image"), number
    return "test images", math.inf


def command_of(config: JsonObject) -> tuple[str, list[str]]:
    """The command that trains with a recorded config, and the keys that the base config lacks."""
    method = config["method"]["name"]
    file = method if method in base.METHODS else "dp_sgd"
    defaults = flat(as_json(base.get_config(file)))
    changed = {k: v for k, v in flat(config).items() if k not in defaults or defaults[k] != v}
    arguments = [f"--config=base:{file}", "--workdir=NEW_FOLDER"]
    arguments += [f"--config.{key}={value}" for key, value in changed.items() if key in defaults]
    quoted = [shlex.quote(argument) for argument in arguments]
    return " \\\n  ".join(["bam train", *quoted]), sorted(changed.keys() - defaults.keys())
