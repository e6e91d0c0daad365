"""A page about one run: a single file that a browser shows without network and without scripts.

What it says of privacy is what `bam.privacy.statement` says of a release, in the same words.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from bam.extras import needs
from bam.files import JsonObject, one_line
from bam.privacy import recheck, statement
from bam.privacy.plan import PrivacyPlan
from bam.privacy.rounding import rounded
from bam.privacy.units import unit_of
from bam.release import export, plots
from bam.release.plots import Chart, Line
from bam.release.records import Run, command_of
from bam.training import registry
from bam.training.rundir import divergence, flat

with needs("train"):
    import jinja2
    from markdown_it import MarkdownIt

# Of Markdown what `statement` writes, and no more: a record that looks like a link stays a text.
_MARKDOWN = MarkdownIt("zero").enable(
    ["heading", "fence", "list", "table", "backticks", "emphasis"]
)
_MARKDOWN.add_render_rule("table_open", lambda *_: '<div class="scroll"><table>\n')
_MARKDOWN.add_render_rule("table_close", lambda *_: "</table></div>\n")
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {
    "markdown": _MARKDOWN.render,
    "rounded_up": lambda number: rounded(number, up=True),
    "svg": plots.svg,
}

ACCURACY = {"test accuracy": "test_accuracy"}
# Charts of what diagnostics measured: title -> label -> name of a measurement.
MEASURED = {
    "Share of examples whose gradient is clipped": {"clipped": "fraction_clipped"},
    "Norms of examples' gradients": {
        "median": "norm_quantile_50", "95 % are below": "norm_quantile_95",
        "5 % are below": "norm_quantile_05",
    },
    "Clipping bias, and the gradient": {"‖bias‖": "bias_norm", "‖ĝ‖": "gradient_norm"},
    "What clipping keeps": {"cosine": "cosine", "‖bias‖/‖ĝ‖": "relative_bias"},
}  # fmt: skip


def page(run: Run, *, public: bool, made_by: str) -> str:
    """The page's HTML.

    Args:
      run: of which the page is.
      public: leave out everything that was computed from data and is not covered by ε, and every
        setting that a release does not state.
      made_by: version and commit of the code.
    """
    dataset = run.summary.get("dataset", "")  # recorded at the end: a run may be given its data
    config = export.settings(run.config, dataset) if public else run.config
    said = one_line(config)
    about = registry.label(said["method"]["name"])
    if dataset:
        about += f" on {export.data_in_words(run.config, dataset).replace('`', '')}"
    # ε tells of the steps that the plan pays for, or so far of those begun.
    counted, epsilon = run.plan["num_steps"], run.plan["epsilon"]
    if run.private and not run.summary:
        counted, epsilon = run.begun, run.epsilon_after(run.begun)
    command, missing = command_of(config)
    # What is left out is nowhere in what the template can show.
    shown = run._replace(name=about, config=config, rows=[]) if public else run
    return _TEMPLATES.get_template("report.html").render(
        run=shown,
        public=public,
        about=about,
        plots=plots,
        epsilon=epsilon,
        unit=unit_of(run.plan),
        nominal=statement.NOMINAL,
        diverged="" if public else divergence(run.summary),
        faults=list(export.faults(run.plan, run.summary)) if run.private and run.summary else [],
        attacker=_attacker(run, epsilon, counted) if run.private and counted else {},
        accuracy=Chart("Test accuracy", "step", _lines(shown, ACCURACY), percent=True),
        measured=_measured(shown),
        statement=_statement(run, said, public) if run.private else [],
        settings={
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in flat(config).items()
        },
        command=command,
        missing=one_line(missing),
        made_with={} if public else _made_with(run.summary),
        limits=statement.limits(run.plan, made_by),
    )


def _attacker(run: Run, epsilon: float, counted: int) -> JsonObject:
    """What the weights leave to an attacker after so many steps, and ε over the steps."""
    plan = PrivacyPlan.from_json(run.plan)
    steps = sorted({round(plan.num_steps * i / 12) for i in range(13)} | {counted})
    spent = {step: plan.epsilon_after(step) for step in steps}
    lines = [
        Line(label, chosen, [spent[step] for step in chosen])
        for label, chosen in (
            ("by the plan" if run.summary else "spent", [s for s in steps if s <= counted]),
            ("still planned", [s for s in steps if s >= counted]),
        )
        if len(chosen) > 1
    ]
    limits = {"ε and δ alone": lambda rate: statement.most_power(epsilon, plan.delta, rate)}
    if own := statement.own_power(plan, counted):
        limits = {"this training": own, **limits}
    rates = [10 ** (i / 20 - 3) for i in range(61)]
    curves = [Line(name, rates, [f(rate) for rate in rates]) for name, f in limits.items()]
    curves.append(Line("guessing", rates, rates))
    return {
        "charts": [
            Chart("Right about a participant, at most", "wrong about others", curves, True, True),
            Chart("ε over training", "steps begun", lines),
        ],
        "names": list(limits),
        "rates": {rate: [f(rate) for f in limits.values()] for rate in statement.FALSE_ALARMS},
    }


def _lines(run: Run, names: Mapping[str, str]) -> list[Line]:
    """What was measured over the steps, label -> name; without what nothing is known of."""
    points = {
        label: [(row["step"], row[name]) for row in run.rows if name in row]
        for label, name in names.items()
    }
    return [Line(label, *zip(*found, strict=True)) for label, found in points.items() if found]


def _measured(run: Run) -> JsonObject:
    """What diagnostics left, which is not private."""
    charts = []
    for title, names in MEASURED.items():
        lines = _lines(run, {label: f"not_private/{name}" for label, name in names.items()})
        if title.startswith("Norms") and lines and run.plan["clip_norm"]:
            lines.append(Line("clip norm C", lines[0].x, [run.plan["clip_norm"]] * len(lines[0].x)))
        if lines:
            charts.append(Chart(title, "step", lines, percent="Share" in title))
    keys = sorted({key for row in run.rows for key in row if key.startswith("not_private/")})
    found = {
        key.removeprefix("not_private/"): [row[key] for row in run.rows if key in row]
        for key in keys
    }
    return {"charts": charts, "found": found}


def _statement(run: Run, config: JsonObject, public: bool) -> list[str]:
    """What `PRIVACY.md` of a release says; nothing where what it states is not recorded."""
    if any(key not in run.summary for key in export.RECORDED):
        return []
    diagnosed = any(key.startswith("not_private/") for row in run.rows for key in row)
    figures = "What this page shows of it is marked; people"
    if public:
        figures = "No figure of it is on this page, but people"
    chosen = run.plan.get("selection")
    return [
        statement.CHOSEN.format(mean=f"{chosen['trials_mean']:g}") if chosen else "",
        statement.in_words(run.plan, run.nominal, "the trained weights"),
        statement.unaccounted(config, run.summary, diagnosed, figures),
        statement.facts(config, run.plan, run.summary, run.nominal),
        recheck.check(run.plan),
    ]


def _made_with(summary: JsonObject) -> JsonObject:
    keys = ("commit", "device", "num_devices", "num_processes")
    known = {key: summary[key] for key in keys if key in summary}
    return known | dict(summary.get("versions", {}).items())
