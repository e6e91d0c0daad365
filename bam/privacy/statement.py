"""`PRIVACY.md`: what a released model guarantees, in words and in numbers that can be recomputed.

Numbers are rounded to the side that claims less: ε, δ and q up, noise down.
"""

import math
import warnings
from collections.abc import Callable

from bam.files import JsonObject
from bam.privacy import accounting, nist, pld, tradeoff
from bam.privacy.mechanisms import ADJACENCIES
from bam.privacy.plan import PrivacyPlan
from bam.privacy.recheck import check
from bam.privacy.rounding import rounded
from bam.privacy.tradeoff import most_power
from bam.privacy.units import neighbours_of, unit_of, worded

NOT_RECORDED = "not recorded"
# How often a test accuses wrongly, where the best test is stated.
FALSE_ALARMS = (0.001, 0.01, 0.05)

ACCOUNTANTS = {
    "pld": "privacy loss distributions (PLD): an upper bound, numerically tight",
    "rdp": "Rényi differential privacy (RDP): an upper bound",
}
CLIPS = {
    "l2": "scaled down to an L2 norm of at most C",
    "normalize": "scaled, up or down, to an L2 norm of at most C",
    "per_layer": "scaled down layer by layer, all together to an L2 norm of at most C",
}


def own_power(plan: PrivacyPlan, num_steps: int) -> Callable[[float], float] | None:
    """`most_power` of so many steps of this very training: α -> power, by what they compose to.

    None where no Poisson-sampled Gaussians are known that dominate it, and for a chosen trial.
    """
    event = None if plan.selection else plan.dp_event_after(num_steps)
    if event is None or event.noise_multiplier < accounting.LEAST_PLD_NOISE:
        return None
    epsilon = plan.epsilon_after(num_steps)
    with warnings.catch_warnings(action="ignore", category=pld.LooseBoundWarning):
        f = accounting.poisson_tradeoff(up_to=max(1.0, 1.5 * epsilon), **event._asdict())

    def power(false_alarm: float) -> float:
        composed = tradeoff.best_true_positive_rate(f, false_alarm) + plan.overflow
        return min(composed, most_power(epsilon, plan.delta, false_alarm))

    return power


def privacy(
    config: JsonObject,
    plan: JsonObject,
    summary: JsonObject,
    *,
    data: str,
    diagnosed: bool,
    exported_by: str,
) -> str:
    """The text of `PRIVACY.md`, in Markdown.

    `config` has the settings that may be published, and `data` is the data set in such words; plan
    and summary are `plan.json` and `summary.json`; `diagnosed`: whether the records hold figures of
    training examples; `exported_by`: version and commit of the code that writes this.
    """
    nominal, chosen = summary["seed"] is not None, bool(plan.get("selection"))
    epsilon, delta = (rounded(plan[key], up=True) for key in ("epsilon", "delta"))
    parts = [
        "# Privacy of this model",
        *([NOMINAL.format(epsilon=epsilon)] if nominal else []),
        _OPENING.format(
            data=data,
            kind="*nominal* " if nominal else "",
            epsilon=epsilon,
            delta=delta,
            each=unit_of(plan).each,
        ),
        *([CHOSEN.format(mean=f"{plan['selection']['trials_mean']:g}")] if chosen else []),
        in_words(plan, nominal),
        facts(config, plan, summary, nominal),
        unaccounted(config, summary, diagnosed),
        nist.answers(plan, summary),
        check(plan),
        limits(plan, exported_by),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


NOMINAL = """\
**The ε in this file is nominal: noise and batches of this run came from a seed, and whoever knows
or guesses the seed can compute the noise and subtract it; then none of the limits below holds.**
Seeds are often small numbers, and trying millions of them is cheap. ε = {epsilon} is what these
settings would give with secret randomness; it is no protection of the people in the data."""

_OPENING = """\
The weights in this folder were trained on {data}, with {kind}({epsilon}, {delta})-differential
privacy for {each}. Nothing else in the folder was computed from the data; it
repeats what is treated as public (listed below)."""

CHOSEN = """\
The settings were chosen on these data, and ε pays for that: this is the best, by a noised score, of
a random number of trials, {mean} on average, each with settings drawn at random from a list that
was fixed before. It holds for whoever does not know how many trials there were and what became of
the others (Papernot & Steinke 2022)."""


OWN_LIMITS = """\
The limits in
the middle are those of this very training, by the noise and the batches of all its steps. In one
number, they are within μ-Gaussian differential privacy for μ = {mu}, rounded up: but for δ, no test
does better than one that tells a draw of a normal distribution from a draw of another whose mean is
μ standard deviations higher. The limits on the right follow from ε and δ alone, and are weaker."""


def in_words(plan: JsonObject, nominal: bool, what: str = "this folder") -> str:
    """What ε and δ promise of `what`, in Markdown as all that follows."""
    epsilon, delta, num_examples = plan["epsilon"], plan["delta"], plan["num_examples"]
    own, mu = own_power(planned := PrivacyPlan.from_json(plan), plan["num_steps"]), planned.mu
    neighbours, unit = neighbours_of(plan), unit_of(plan)
    powers = [lambda alarm: most_power(epsilon, delta, alarm)]
    head, source = '"yes" if trained with it, at most %', "These limits follow from ε\nand δ alone."
    if own and mu is not None:
        powers.insert(0, own)
        head += " | the same by ε and δ alone, %"
        source = OWN_LIMITS.format(mu=rounded(mu, up=True))
    rows = "\n".join(
        " | ".join([f"| {100 * alarm:g}", *(rounded(100 * p(alarm), up=True) for p in powers)])
        + " |"
        for alarm in FALSE_ALARMS
    )
    one_in = f"1/{num_examples} = {rounded(1 / num_examples, up=False, digits=2)}"
    double = rounded(min(1, (1 + math.exp(epsilon)) * delta), up=True)
    several = unit.several.format(two=f"({rounded(2 * epsilon, up=True)}, {double})")
    return f"""\
## In plain words

**What is protected.** {unit.protected} Random noise
was added during training, so that the same weights could have come out {neighbours.could}
too; ε and δ limit how much less likely that would have been.

**From whom.** From anyone who has {what}, whatever else they have: the program, all settings
below, every other {unit.others}, other data, and any amount of computing short of what it takes
to find the random numbers that were used{" (here: the seed)" if nominal else ""}; see "noise".

**What ε and δ mean.** Suppose somebody tests whether {neighbours.tests}.
However clever the test, if it says "yes" of weights that were trained {neighbours.otherwise} as
often as on the left, it says "yes" of weights that were trained with it at most as often as on the
right:

| "yes" if trained {neighbours.otherwise}, % | {head} |
|---:|{"---:|" * len(powers)}
{rows}

The same on both sides would be perfect privacy; 100 on the right, none. {source}
By them the right side is at most e^ε times the left plus δ, and the same holds of "no". A
smaller ε brings the sides together. δ is the part of the difference that no factor limits; here it
is {rounded(delta, up=True)}. It has to be far below one in the number of {unit.many}:
a δ of {one_in} would allow publishing {worded("an example", unit.name)} outright.

**What is not protected.**

- {several}{neighbours.versions}
- *What holds for people in general.* A model that learns from many that a habit goes with an
  illness says so of everybody with that habit, in the data or not.
- *What is treated as public:* the {neighbours.number} ({num_examples}), {unit.public},
  the classes, the constants that normalise the inputs, and all settings.
- *Anything released besides {what}.* Other models and figures from the same data add their ε
  to this one, roughly. The run's own folder, checkpoints above all, is not for release.
- *Test examples,* and what else stands under "Looked at without accounting"."""


def facts(config: JsonObject, plan: JsonObject, summary: JsonObject, nominal: bool) -> str:
    """Every number and choice that the guarantee rests on."""
    versions, clip = summary["versions"], config["clip"]["name"]
    planned = PrivacyPlan.from_json(plan)
    size, prob = plan["expected_batch_size"], planned.mechanism.sampling_prob
    most = ", at most" if planned.num_examples_given else ""
    batch: list[tuple[str, object, object]] = [
        ("l, batch size, or what it is on average" + most, "", size),
        ("q = l/N, rounded up", rounded(plan["sampling_prob"], up=True), plan["sampling_prob"]),
    ]
    if prob != plan["sampling_prob"]:  # of batches that divide the data
        batch = [
            ("l, what a step's sum is divided by", "", size),
            ("N/b, batch size on average", "", plan["num_examples"] * prob),
            ("q = 1/b, rounded up", rounded(prob, up=True), prob),
        ]
    noise_std = plan["noise_multiplier"] * summary["sensitivity"]
    unit, neighbours = unit_of(plan), neighbours_of(plan)
    own = [f"{k} `{config[k]['name']}`" for k in ("method", "clip") if ":" in config[k]["name"]]
    source = "**a seed** (see the top)" if nominal else "secret and never saved"
    rows: list[tuple[str, object, object]] = [
        ("unit of privacy", unit.fact, ""),
        (
            "adjacency",
            worded(ADJACENCIES[planned.adjacency][1], unit.name),
            f"`{planned.adjacency}`",
        ),
        ("ε, rounded up", rounded(plan["epsilon"], up=True), plan["epsilon"]),
        ("δ, rounded up", rounded(plan["delta"], up=True), plan["delta"]),
        *([("μ of Gaussian DP", rounded(planned.mu, up=True), planned.mu)] if planned.mu else []),
        ("accountant", ACCOUNTANTS[plan["accountant"]], f"`{plan['accountant']}`"),
        ("accountant's version", f"dp-accounting {versions['dp-accounting']}", ""),
        *_choice(plan),
        (f"N, {neighbours.number}", "", plan["num_examples"]),
        *batch,
        ("sampling", summary["sampling"], f"`{plan.get('mechanism', 'poisson')}`"),
        ("T, steps that ε pays for", "", plan["num_steps"]),
        ("steps begun, lost ones included", "", summary.get("steps_begun", NOT_RECORDED)),
        ("steps taken", "", summary.get("steps_taken", NOT_RECORDED)),
        ("method", "", f"`{config['method']['name']}`"),
        (unit.gradient, CLIPS.get(clip, "given a norm of at most S"), f"`{clip}`"),
        ("C, clip norm", "", plan["clip_norm"] or "none: the clip is the caller's"),
        ("S, sensitivity", neighbours.sensitivity, summary["sensitivity"]),
        (
            "σ, noise multiplier, rounded down",
            rounded(plan["noise_multiplier"], up=False),
            plan["noise_multiplier"],
        ),
        (
            "σS, standard deviation of the fresh noise on a step's sum, rounded down",
            rounded(noise_std, up=False),
            noise_std,
        ),
        ("noise", summary["noise"], ""),
        ("noise and batches come from", source, summary["noise_key"]),
        ("code by others than bam that the guarantee rests on", ", ".join(own) or "none", ""),
        ("device", summary["device"], ""),
        ("libraries", ", ".join(f"{k} {v}" for k, v in versions.items()), ""),
        ("commit of bam's code", summary["commit"], ""),
    ]
    lines = "\n".join(f"| {name} | {value} | {exact} |" for name, value, exact in rows)
    return f"""\
## Facts

Each step takes the gradients of a batch, bounds each {unit.name}'s own, adds them up, adds noise
once, and divides by l. Training uses the training examples for nothing else.

| fact | in words, or rounded | exactly, as used |
|---|---|---|
{lines}"""


def _choice(plan: JsonObject) -> list[tuple[str, object, object]]:
    """The facts that ε rests on further if the run was chosen."""
    if not plan.get("selection"):
        return []
    mean, shape, noise = (
        plan["selection"][k] for k in ("trials_mean", "trials_shape", "score_noise_multiplier")
    )
    drawn = "truncated negative binomial: 0 is logarithmic, 1 geometric"
    return [
        ("E[K], trials on average", "K is drawn before the first, and secret", mean),
        ("η, shape of the distribution of K", drawn, shape),
        ("noise on a trial's score", "standard deviation, in images classified right", noise),
    ]


def unaccounted(
    config: JsonObject,
    summary: JsonObject,
    diagnosed: bool,
    figures: str = "No figure of it is in this folder, but people",
) -> str:
    """What was looked at that ε does not cover; `figures` begins the sentence on who saw it."""
    holdout, evaluated = config["dataset"].get("holdout", 0), config["eval"]["every"]
    measured = "none in the run's records"
    if config["diagnostics"]["every"] or diagnosed:
        measured = (
            "**yes**: losses, norms and clipping bias were measured and shown during training"
        )
    chosen = bool(summary.get("selection"))
    aside, covered = "none", "ε covers this choice by them" if chosen else "no ε covers them"
    if holdout:
        aside = (
            f"**{holdout}** were set aside and stood in for test examples; they are not among the "
            f"N, and {covered}"
        )
    tested = f"every {evaluated} steps and at the end" if evaluated else "at the end"
    tested = "none was measured" if chosen and holdout else tested
    settings = among = "not known to this file"
    if chosen:
        settings = "**yes**, by the search that ε pays for; others: not known to this file"
        among = "**yes**, by the search that ε pays for"
    weights = config.get("loss", {}).get("weights")
    weighed = f"**{list(weights)}**, which whoever trained declares public" if weights else "none"
    clip_norm = "a setting"
    if config["public_clip"]["quantile"]:
        clip_norm = "from another data set, which whoever trained declares public"
    declared = "which whoever trained declares made without these data"
    begun = "at random"
    if digest := summary.get("init_digest"):
        begun = f"**in a file** (SHA-256 {digest}), {declared}"
    if frozen := summary.get("num_frozen"):
        begun += f"; {frozen} of {frozen + summary['num_params']} were left as they began"
    name = config.get("features", {}).get("name", "")
    seen = "none: the examples themselves"
    if name:
        seen = f"by `{name}`, a fixed map of each image alone, made without these data"
    if digest := summary.get("features_digest"):
        seen = f"**by `{name}`**, a frozen network of the weights of SHA-256 {digest}, {declared}"
    if ":" in name:
        seen = f"**by `{name}`**, {declared}"
    return f"""\
## Looked at without accounting

ε does not cover what follows. {figures} may have seen it and
acted on it. What is "not known to this file" is for whoever releases the model to say.

| what | in this run |
|---|---|
| figures of training examples | {measured} |
| training examples held out | {aside} |
| accuracy on test examples | {tested}; test examples are not protected |
| C, the clip norm | {clip_norm} |
| weights of the classes in the loss | {weighed} |
| weights before training | {begun} |
| features of the examples | {seen} |
| constants that normalise the inputs | taken as public, whatever they were computed from |
| hyper-parameters chosen by looking at this data | {settings} |
| this run chosen among several | {among} |
| other releases from the same data | not known to this file |"""


def limits(plan: JsonObject, exported_by: str) -> str:
    """What no record can show; `exported_by` is version and commit of the code that writes it."""
    person = unit_of(plan).person
    return f"""\
## What this file cannot show

A program ({exported_by})
wrote it from the records of the run. That training went as recorded, on data with
{person} if that is claimed, and that nothing else was released, is the word of
whoever releases the model."""
