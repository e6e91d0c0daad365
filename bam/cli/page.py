"""A page about one run: a single file that a browser shows without network and without scripts.

What it says of privacy is what `bam.release.statement` says of a release, in the same words.
"""

import html
import json
from pathlib import Path

from bam.cli import markup
from bam.cli.svg import Line, chart
from bam.files import JsonObject, one_line
from bam.privacy import accounting, recheck, tradeoff
from bam.privacy.units import unit_of, worded
from bam.release import export, statement
from bam.release.records import Run, command_of
from bam.release.statement import rounded
from bam.training import registry
from bam.training.rundir import flat

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

_PUBLIC = """\
**This page may be passed on.** Nothing on it was computed from the data: it repeats the settings,
the privacy plan and what is treated as public. Accuracy, times, paths, the seed and figures of
training examples are left out."""
_NOT_PUBLIC = """\
**Not for passing on.** This page is for whoever trained: it shows figures that ε does not cover,
and settings with paths and the seed. With `--public` a page is written without them."""
_NOT_PRIVATE = """\
No noise was added: these weights may give away single training examples, and nothing limits how
well. Release neither them nor this page."""
_MEASURED = """\
**What follows was computed from training examples without noise. No ε covers it:** whoever sees it
may learn about single examples. It is on this page because diagnostics were on."""


# What an attacker says, and by what it is judged, for each kind of neighbours.
_ATTACKS = {
    "add_or_remove_one": """\
says whether one
given example took part. However clever the attack, this is how often at most it is right about one
that did, by how often it is wrong about one that did not.""",
    "replace_one": """\
says which of two
given examples took part in the place of the other. However clever the attack, this is how often at
most it is right where the one took part, by how often it is wrong where the other did.""",
}


def page(run: Run, *, public: bool, made_by: str) -> str:
    """The page's HTML.

    `public` leaves out everything that was computed from data and is not covered by ε, and every
    setting that a release does not state; `made_by` is version and commit of the code.
    """
    dataset = run.summary.get("dataset", "")  # recorded at the end: a run may be given its data
    config = export.settings(run.config, dataset) if public else run.config
    said = one_line(config)
    about = registry.label(said["method"]["name"])
    if dataset:
        about += f" on {export.data_in_words(run.config, dataset)}"
    name = markup.inline(about) if public else html.escape(run.name)
    epsilon = run.plan["epsilon"]
    if run.private and not run.summary:
        epsilon = run.epsilon_after(run.begun)
    sections = [
        f"<h1>{name}</h1>",
        f'<p class="under">{"" if public else f"{markup.inline(about)} · "}{_state(run)}</p>',
        _notice(_PUBLIC, "good") if public and run.private else "",
        "" if public else _notice(_NOT_PUBLIC),
        *(_warnings(run, epsilon) if run.private else _not_private()),
        _key_numbers(run, epsilon, public),
        _privacy(run, epsilon) if run.private else "",
        "" if public else _accuracy(run),
        "" if public else _measured(run),
        _statement(run, said, public) if run.private else "",
        _settings(config),
        _again(run, config, public),
        f"<footer>{markup.markdown(statement.limits(run.plan, made_by))}</footer>",
    ]
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    title = html.escape(about.replace("`", "") if public else run.name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{chr(10).join(filter(None, sections))}
</body>
</html>
"""


def _state(run: Run) -> str:
    """Whether the run is finished."""
    steps = f"{run.begun} of the {run.plan['num_steps']} steps that its plan pays for are begun"
    return "finished" if run.summary else f"<strong>not finished</strong>: {steps}"


def _not_private() -> list[str]:
    return [
        f'<div class="notice"><p class="large">NOT PRIVATE</p>{markup.markdown(_NOT_PRIVATE)}</div>'
    ]


def _warnings(run: Run, epsilon: float) -> list[str]:
    """What speaks against the ε on the page."""
    said = [statement.NOMINAL.format(epsilon=rounded(epsilon, up=True))] if run.nominal else []
    if run.summary:
        said += [f"**Do not trust this ε:** {x}." for x in export.faults(run.plan, run.summary)]
    return [_notice(text) for text in said]


def _key_numbers(run: Run, epsilon: float | None, public: bool) -> str:
    plan = run.plan
    tested = [row["test_accuracy"] for row in run.rows if "test_accuracy" in row]
    shown = [("ε", "none", "not private")]
    if run.private:
        name, more = "ε", "rounded up"
        if not run.summary:
            name, more = "ε so far", f"{rounded(plan['epsilon'], up=True)} at the end"
        assert epsilon is not None
        shown = [(name, rounded(epsilon, up=True), more)]
        shown.append(("δ", rounded(plan["delta"], up=True), "rounded up"))
    if tested and not public:
        shown.append(
            ("test accuracy", f"{100 * tested[-1]:.1f} %", "ε does not protect test examples")
        )
    steps = run.summary.get("steps_taken", run.begun)
    training = plan["num_steps"] - plan.get("spare_steps", 0)
    shown.append(("steps", f"{steps:,}", f"of {training:,}"))
    shown.append((unit_of(plan).many, f"{plan['num_examples']:,}", "treated as public"))
    numbers = "".join(
        f"<div><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>"
        for name, value, more in shown
    )
    return f'<dl class="numbers">{numbers}</dl>'


def _privacy(run: Run, epsilon: float) -> str:
    """ε over the steps, and what it leaves to an attacker."""
    plan = run.plan
    begun = run.begun if not run.summary else plan["num_steps"]
    if not begun:
        return "<h2>Privacy</h2><p>No step is begun: nothing is spent.</p>"
    steps = sorted({round(plan["num_steps"] * i / 12) for i in range(13)} | {begun})
    spent = {step: run.epsilon_after(step) for step in steps}
    lines = [
        Line(label, chosen, [spent[step] for step in chosen])
        for label, chosen in (
            ("spent" if not run.summary else "by the plan", [s for s in steps if s <= begun]),
            ("still planned", [s for s in steps if s >= begun]),
        )
        if len(chosen) > 1
    ]
    limits = {"ε and δ alone": lambda rate: statement.most_power(epsilon, plan["delta"], rate)}
    event = None if plan.get("selection") else run.dp_event_after(begun)
    if event and event.noise_multiplier >= accounting.LEAST_PLD_NOISE:
        f = accounting.poisson_tradeoff(up_to=max(1.0, 1.5 * epsilon), **event._asdict())
        alone = limits["ε and δ alone"]
        best = lambda rate: min(alone(rate), tradeoff.best_true_positive_rate(f, rate))  # noqa: E731
        limits = {"this training": best, **limits}
    rates = [10 ** (i / 20 - 3) for i in range(61)]
    attacker = [Line(name, rates, [f(rate) for rate in rates]) for name, f in limits.items()]
    attacker.append(Line("guessing", rates, rates))
    table = [
        (f"{100 * rate:g}", *(rounded(100 * f(rate), up=True) for f in limits.values()))
        for rate in statement.FALSE_ALARMS
    ]
    charts = chart("Right about a participant, at most", "wrong about others", attacker, True, True)
    charts += chart("ε over training", "steps begun", lines)
    heading = ("wrong about others, %", *(f"right at most, %, by {name}" for name in limits))
    return f"""<h2>What an attacker can gain</h2>
<p>An attacker has the weights, all settings and every other {unit_of(plan).others}, and
{worded(_ATTACKS[plan["adjacency"]], unit_of(plan).name)}</p>
<div class="charts">
{charts}
</div>
{markup.table(heading, table, right=range(len(heading)))}"""


def _accuracy(run: Run) -> str:
    points = [(row["step"], row["test_accuracy"]) for row in run.rows if "test_accuracy" in row]
    if len(points) < 2:
        return ""
    line = Line("test accuracy", *zip(*points, strict=True))
    text = "Of test examples, which ε does not protect."
    drawn = chart("Test accuracy", "step", [line], percent=True)
    return f'<h2>Accuracy</h2>\n<p>{text}</p>\n<div class="charts">{drawn}</div>'


def _measured(run: Run) -> str:
    """What diagnostics left, marked as not private; nothing without."""
    prefix = "not_private/"
    rows = [row for row in run.rows if any(key.startswith(prefix) for key in row)]
    if not rows:
        return ""
    charts = []
    for title, names in MEASURED.items():
        lines = []
        for label, name in names.items():
            points = [(r["step"], r[prefix + name]) for r in rows if prefix + name in r]
            if points:
                lines.append(Line(label, *zip(*points, strict=True)))
        if title.startswith("Norms") and lines and run.plan["clip_norm"]:
            lines.append(Line("clip norm C", lines[0].x, [run.plan["clip_norm"]] * len(lines[0].x)))
        if lines:
            charts.append(chart(title, "step", lines, percent="Share" in title))
    keys = sorted({key for row in rows for key in row if key.startswith(prefix)})
    ends = [[row[key] for row in rows if key in row] for key in keys]
    table = [
        (key.removeprefix(prefix), f"{values[0]:.4g}", f"{values[-1]:.4g}")
        for key, values in zip(keys, ends, strict=True)
    ]
    return f"""<section class="private">
<h2>Measured on training examples: NOT PRIVATE</h2>
{markup.markdown(_MEASURED)}
<div class="charts">{"".join(charts)}</div>
<details><summary>All {len(keys)} measurements</summary>
{markup.table(("measurement", "first", "last"), table, right=(1, 2))}
</details>
</section>"""


def _statement(run: Run, config: JsonObject, public: bool) -> str:
    """What `PRIVACY.md` of a release says; nothing where what it states is not recorded."""
    if any(key not in run.summary for key in export.RECORDED):
        return ""
    diagnosed = any(key.startswith("not_private/") for row in run.rows for key in row)
    figures = "What this page shows of it is marked; people"
    if public:
        figures = "No figure of it is on this page, but people"
    chosen = run.plan.get("selection")
    texts = (
        statement.CHOSEN.format(mean=f"{chosen['trials_mean']:g}") if chosen else "",
        statement.in_words(run.plan, run.nominal, "the trained weights"),
        statement.unaccounted(config, run.summary, diagnosed, figures),
        statement.facts(config, run.plan, run.summary, run.nominal),
        recheck.check(run.plan),
    )
    return "\n".join(markup.markdown(text) for text in texts if text)


def _settings(config: JsonObject) -> str:
    rows = [
        (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for key, value in flat(config).items()
    ]
    return f"""<h2>Settings</h2>
<details><summary>All {len(rows)} that this page states</summary>
{markup.table(("key", "value"), rows)}
</details>"""


def _again(run: Run, config: JsonObject, public: bool) -> str:
    """The command that trains with these settings, and what trained them."""
    command, missing = command_of(config)
    same = "trains with the same settings, and with batches and noise of its own"
    if config.get("seed") is not None:
        same = "gives the same run, to the bit with the same versions on the same kind of device"
    own = ""
    if missing:
        lacks = ", ".join(one_line(missing))
        own = f" the base config lacks {lacks}: name a config file that has them."
    made_with = ""
    if not public:  # the statement has what may be said of them
        keys = ("commit", "device", "num_devices", "num_processes")
        found = [(key, str(run.summary[key])) for key in keys if key in run.summary]
        found += [(key, str(version)) for key, version in run.summary.get("versions", {}).items()]
        made_with = markup.table(("made with", ""), found) if found else ""
    return f"""<h2>Train it again</h2>
<p>{markup.inline(f"This {same}. `NEW_FOLDER` is for its files.{own}")}</p>
{markup.code(command)}
{made_with}"""


def _notice(text: str, kind: str = "") -> str:
    return f'<div class="notice {kind}">{markup.markdown(text)}</div>'
