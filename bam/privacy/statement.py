"""`PRIVACY.md`: what a released model guarantees, in words and in numbers that can be recomputed.

One text of two variables: the plan's mechanism, which brings its own words, and its unit of
privacy, "example" or "user". It is made of f-strings because a training by a loop of one's own
states the same where no extra, and so no Jinja, is installed. Numbers are rounded to the side that
claims less: ε, δ and q up, noise down.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

from dp_accounting import dp_event

from bam.files import JsonMapping, JsonObject
from bam.privacy import accounting, ledger, pld, random_allocation, tradeoff
from bam.privacy.plan import PrivacyPlan
from bam.privacy.rounding import rounded_down, rounded_up
from bam.privacy.tradeoff import most_power

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
# What code that is not bam's must do for ε to hold: each key of a config that can name a
# MODULE:FUNCTION, and the two parts that a loop of one's own brings.
PROMISES = {
    "method.name": "the gradient of one example, from that example and what is private already",
    "clip.name": "an L2 norm of at most S, whatever it is given (what is longer is dropped)",
    "loss.name": "a function of one example, whose constants, such as weights of classes, were not "
    "computed from the training data",
    "model.name": "each example's output from that example alone, no statistic of a batch, and "
    "nothing in it that was computed from the training data",
    "features.name": "a map of each example alone, made without the training data",
    "dataset.name": "rows that are examples, each made from one original alone (of users: with the "
    "id of the one that it is of), and constants that were not computed from them",
    "optimizer.name": "post-processing: of the data it sees private gradients alone",
    "public_clip.dataset": "public data, which share no example with the training data",
    "oracle": "the gradient of one example, from that example and what is private already, by "
    "constants that were not computed from the training data",
    "clip": "an L2 norm of at most S, whatever it is given (what is longer is dropped)",
}
# What of a unit of privacy is bounded, by who takes the gradient.
OF_TRAIN = {
    "example": "the method's gradient of each example's loss",
    "user": "the method's gradient of each user's mean loss",
}
OF_OWN_LOOP = {
    "example": "the oracle's gradient of each example",
    "user": "the mean of the oracle's gradients of each user's examples",
}
NOMINAL = """\
**The ε in this file is nominal: noise and batches of this run came from a seed, and whoever knows
or guesses the seed can compute the noise and subtract it; then none of the limits below holds.**
Seeds are often small numbers, and trying millions of them is cheap. ε = {epsilon} is what these
settings would give with secret randomness; it is no protection of the people in the data."""


def rounded(value: float) -> str:
    """What is claimed, in four digits and never below the number; see `bam.privacy.rounding`."""
    return rounded_up(value, ".4g")


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
    config: JsonMapping,
    plan: PrivacyPlan,
    summary: JsonMapping,
    *,
    diagnosed: bool,
    own_parts: Mapping[str, str] | None = None,
    **words: str,
) -> str:
    """The statement of a finished run of `bam train`.

    `config` has the settings that may be published; `summary` is `summary.json`; `diagnosed`:
    whether the records hold figures of training examples; `own_parts` are those of `of_training`,
    None: of `config`; `words` are `data`, `exported_by` and `released` of `of_training`.
    """
    names = {key: config[key].get("name", NOT_RECORDED) for key in ("method", "clip")}
    looked_at = unaccounted(config, summary, diagnosed)
    own = parts_of(config) if own_parts is None else own_parts
    record = {**summary, "own_parts": own, "bounded": OF_TRAIN[plan.unit]}
    return of_training(plan, record, looked_at=looked_at, **names, **words)


def parts_of(config: JsonMapping) -> dict[str, str]:
    """The config's keys, of `PROMISES`, that name a MODULE:FUNCTION, with the name."""
    named = {}
    for key in PROMISES:
        section, _, name = key.partition(".")
        options = config.get(section)
        value = options.get(name) if name and isinstance(options, Mapping) else ""
        if isinstance(value, str) and ":" in value:
            named[key] = value
    return named


def of_training(
    plan: PrivacyPlan,
    record: JsonMapping,
    *,
    data: str,
    method: str,
    clip: str,
    looked_at: str,
    exported_by: str,
    released: str = "this folder",
) -> str:
    """The text of `PRIVACY.md`, in Markdown, whose texts are of one line each.

    Args:
      plan: of the training.
      record: what it recorded: seed, sensitivity, sampling, noise, noise_key, the steps begun and
        taken, and the `processes` that took them (`bam.privacy.ledger`; of a run that recorded
        none, `device`, `versions` and `commit` of the last). What its caller knows: `own_parts`,
        keys of `PROMISES` with the name of what is not bam's own there, or ""; and `bounded`, the
        gradient that the clip is given, in words: `OF_TRAIN` or `OF_OWN_LOOP`.
      data: the data set, in words that may be published.
      method: its name.
      clip: its name.
      looked_at: what ε does not cover.
      exported_by: version and commit of the code that writes this.
      released: what the reader has, if it is not such a folder.
    """
    nominal = record["seed"] is not None
    epsilon, delta = rounded(plan.epsilon), rounded(plan.delta)
    commits = "that commit" if len(shares_of(record)) == 1 else "each commit that it names"
    each, folder, chosen = "each single training example", "", ""
    if plan.unit == "user":
        each = "each single user, for all training examples\nof that user together"
    if released == "this folder":
        folder = """ Nothing else in the folder was computed from the data; it
repeats what is treated as public (listed below)."""
    if plan.selection:
        chosen = f"""

The settings were chosen on these data, and ε pays for that: this is the best, by a noised score, of
a random number of trials, {plan.selection.trials_mean:g} on average, each with settings drawn at
random from a list that was fixed before. It holds for whoever does not know how many trials there
were and what became of the others (Papernot & Steinke 2022)."""
    return f"""\
# Privacy of this model

{NOMINAL.format(epsilon=epsilon) + chr(10) * 2 if nominal else ""}\
The weights{" in this folder" if folder else ""} were trained on {data}, with \
{"*nominal* " if nominal else ""}({epsilon}, {delta})-differential
privacy for {each}.{folder}{chosen}

{in_words(plan, nominal, released)}

{facts(plan, record, method, clip)}

## Looked at without accounting

{looked_at}

{nist(plan, released)}

## Check it

{recomputation(plan)}

What q is, and that the noise is σ times S, stands in the table. That the program does what the
table says can be read, and tested, in its code at {commits} (where it says "modified", with
changes that are in no commit).

## What this file cannot show

A program ({exported_by}) wrote it from the records of the run.
That training went as recorded, on data with one {_owned(plan)} per person if that is claimed, and
that nothing else was released, is the word of whoever releases the model.
"""


def _owned(plan: PrivacyPlan) -> str:
    """What a person may have several of."""
    return "id" if plan.unit == "user" else "example"


def _number(plan: PrivacyPlan) -> str:
    """What N is."""
    number = f"number of {'users' if plan.unit == 'user' else 'training examples'}"
    if plan.num_examples_given:
        return f"upper bound on the {number}, fixed without counting"
    return number


def _protected(plan: PrivacyPlan) -> str:
    """The unit of privacy."""
    if plan.unit == "user":
        k = plan.group_size
        return f"user: all training examples that carry one id, together; at most {k} are used"
    return "training example: one row of the data set, that is one image or record with its label"


def in_words(plan: PrivacyPlan, nominal: bool, released: str) -> str:
    """What ε and δ promise to whom, and what they do not."""
    unit, owned, n = plan.unit, _owned(plan), plan.num_examples
    could, otherwise = f"with nothing in the place of that {unit}", "with nothing in its place"
    if plan.num_examples_given:
        could, otherwise = f"without that {unit}", f"without the {unit}"
    doubled = rounded(2 * plan.epsilon), rounded(min(1, (1 + math.exp(plan.epsilon)) * plan.delta))
    return f"""\
## In plain words

**What is protected.** Each single {_protected(plan)}.
{"**It is not one person, who may have several.** " if unit == "example" else ""}\
Random noise was added during training, so that the same weights could have come out {could}
too; ε and δ limit how much less likely that would have been.

**From whom.** From anyone who has {released}, whatever else they have: the program, all settings
below, every training example {"of other users" if unit == "user" else "but that one"}, other data,
and any amount of computing short of what it takes to find the random numbers that were used\
{" (here: the seed)" if nominal else ""}; see "noise".

**What ε and δ mean.** Suppose somebody tests whether one given {unit} was among the training \
{unit}s.
However clever the test, if it says "yes" of weights that were trained {otherwise} as
often as on the left, it says "yes" of weights that were trained with it at most as often as on the
right:

{_powers(plan, otherwise)}
By them the right side is at most e^ε times the left plus δ, and the same holds of "no". A
smaller ε brings the sides together. δ is the part of the difference that no factor limits; here it
is {rounded(plan.delta)}. It has to be far below 1/N: a δ of 1/{n} = {rounded_down(1 / n, ".2g")}
would allow publishing {"a user" if unit == "user" else "an example"} outright.

**What is not protected.**

- *People with several {owned}s.* The promise is per {owned}\
{", for all of its examples together" if unit == "user" else ""}. With two, a person
  has ({doubled[0]}, {doubled[1]}) instead; with more, less protection still. The same pair limits
  how well two versions of one {unit} can be told apart.
- *What holds for people in general.* A model that learns from many that a habit goes with an
  illness says so of everybody with that habit, in the data or not.
- *What is treated as public:* the {_number(plan)} ({n}),
  {f"the most examples used of each ({plan.group_size}), " if unit == "user" else ""}the size and \
format of examples, the names of the classes, the constants that
  prepare and normalise the inputs, and all settings.
- *Anything released besides {released}.* Other models and figures from the same data add their ε
  to this one, roughly. The run's own folder, checkpoints above all, is not for release.
- *Test examples,* and what else stands under "Looked at without accounting"."""


def _powers(plan: PrivacyPlan, otherwise: str) -> str:
    """The table of the best tests, with what it rests on."""
    powers: list[Callable[[float], float]]
    powers = [lambda alarm: most_power(plan.epsilon, plan.delta, alarm)]
    head = '"yes" if trained with it, at most %'
    rests_on = "These limits follow from ε and\nδ alone."
    own, mu = own_power(plan, plan.num_steps), plan.mu
    if own and mu is not None:
        powers.insert(0, own)
        head += " | the same by ε and δ alone, %"
        rests_on = f"""The limits in
the middle are those of this very training, by the noise and the batches of all its steps. In one
number, they are within μ-Gaussian differential privacy for μ = {rounded(mu)}, rounded up: but for
δ, no test does better than one that tells a draw of a normal distribution from a draw of another
whose mean is μ standard deviations higher. The limits on the right follow from ε and δ alone, and
are weaker."""
    shares = [(f"{100 * x:g}", *(rounded(100 * f(x)) for f in powers)) for x in FALSE_ALARMS]
    rows = "\n".join(f"| {' | '.join(row)} |" for row in shares)
    return f"""\
| "yes" if trained {otherwise}, % | {head} |
|---:|{"---:|" * len(powers)}
{rows}

The same on both sides would be perfect privacy; 100 on the right, none. {rests_on}"""


def facts(plan: PrivacyPlan, record: JsonMapping, method: str, clip: str) -> str:
    """Every number and choice that the guarantee rests on."""
    unit, given = plan.unit, plan.num_examples_given
    sigma, std = plan.noise_multiplier, plan.noise_multiplier * record["sensitivity"]
    neighbours = "replaced by nothing, its place left empty (zero-out)"
    neighbours = "added or removed" if given else neighbours
    norm = plan.clip_norm if plan.clip_norm < math.inf else "none: the clip is the caller's"
    source = "secret and never saved" if record["seed"] is None else "**a seed** (see the top)"
    prob, size = plan.mechanism.sampling_prob, plan.expected_batch_size
    batch = f"""l, batch size, or what it is on average{", at most" * given} | | {size} |
| q = l/N"""
    if prob != plan.sampling_prob:  # of batches that divide the data
        batch = f"""l, what a step's sum is divided by | | {size} |
| N/b, batch size on average | | {plan.num_examples * prob} |
| q = 1/b"""
    mu = f"\n| μ of Gaussian DP, but for δ | {rounded(plan.mu)} | {plan.mu} |" if plan.mu else ""
    bound = CLIPS.get(clip, "given a norm of at most S")
    if "oracle" in record["own_parts"] and "clip" not in record["own_parts"]:
        bound += " by one of bam's own clips, whose bound is proved"
    choice = ""
    if plan.selection:
        mean, shape, noise = dataclasses.astuple(plan.selection)
        choice = f"""
| E[K], trials on average | K is drawn before the first, and secret | {mean} |
| η, shape of the distribution of K | truncated negative binomial: 0 is logarithmic, 1 geometric \
| {shape} |
| noise on a trial's score | standard deviation, in images classified right | {noise} |"""
    return f"""\
## Facts

Each step takes the gradients of a batch, bounds each {unit}'s own, adds them up, adds noise
once, and divides by l. Training uses the training examples for nothing else.

| fact | in words, or rounded | exactly, as used |
|---|---|---|
| unit of privacy | one {_protected(plan)} | |
| adjacency | one {unit} {neighbours} | `{plan.adjacency}` |
| ε, rounded up | {rounded(plan.epsilon)} | {plan.epsilon} |
| δ, rounded up | {rounded(plan.delta)} | {plan.delta} |{mu}
| accountant | {ACCOUNTANTS[plan.accountant]} | `{plan.accountant}` |{choice}
| N, {_number(plan)} | | {plan.num_examples} |
| {batch}, rounded up | {rounded(prob)} | {prob} |
| sampling | {record["sampling"]} | `{plan.mechanism_name}` |
| T, steps that ε pays for | | {plan.num_steps} |
| steps begun, lost ones included | | {record.get("steps_begun", NOT_RECORDED)} |
| steps taken | | {record.get("steps_taken", NOT_RECORDED)} |
| method | | `{method}` |
| {record["bounded"]} is | {bound} | `{clip}` |
| C, clip norm | | {norm} |
| S, sensitivity | how far one {unit} moves the sum, in L2 | {record["sensitivity"]} |
| σ, noise multiplier, rounded down | {rounded_down(sigma, ".4g")} | {sigma} |
| σS, standard deviation of the fresh noise on a step's sum, rounded down | \
{rounded_down(std, ".4g")} | {std} |
| noise | {record["noise"]} | |
| noise and batches come from | {source} | {record["noise_key"]} |
| code by others than bam that the guarantee rests on | {promises(record["own_parts"])} | |
{taken_by(record)}"""


def promises(parts: Mapping[str, str]) -> str:
    """The parts that are not bam's own, each with what it must be."""
    each = []
    for key, name in parts.items():
        part = key.removesuffix(".name").replace("dataset", "data set").replace(".", "'s ")
        each.append(f"{part}{f' `{name}`' if name else ''}, which must be: {PROMISES[key]}")
    return "; ".join(each) or "none"


class Share(NamedTuple):
    """Steps, counted as begun, that processes of the same code, libraries and devices took.

    Attributes:
      first: of these steps.
      last: of these steps; less than `first` where later processes took all of them again.
      process: what `bam.privacy.ledger.this_process` recorded; None where nothing is.
    """

    first: int
    last: int
    process: JsonObject | None


def shares_of(record: JsonMapping) -> list[Share]:
    """What took the steps of a training, in order, by its record's `processes`.

    Without a seed each process begins its steps after those of the one before. With one, a process
    takes steps again that the one before had not saved.
    """
    recorded, last = record.get("processes"), record.get("steps_begun")
    if not ledger.are_processes(recorded) or type(last) is not int:
        return [Share(1, 0, None)]
    shares: list[Share] = []
    for process in reversed(recorded):
        first = process["first_step"]
        none_taken = first > last and (record["seed"] is None or not shares)
        if not none_taken:
            after = shares[0] if shares else None
            if after and after.process and _same(after.process, process):
                shares[0] = after._replace(first=min(first, after.first))
            else:
                shares.insert(0, Share(first, last, process))
        last = min(last, first - 1)
    if last > 0:
        shares.insert(0, Share(1, last, None))
    return shares or [Share(1, 0, recorded[-1] if recorded else None)]


def _same(one: JsonMapping, other: JsonMapping) -> bool:
    """Whether two processes differ in nothing but their first step."""
    return {**one, "first_step": 0} == {**other, "first_step": 0}


def taken_by(record: JsonMapping) -> str:
    """Rows on the code, the libraries and the devices of every step."""
    shares = shares_of(record)
    if len(shares) > 1:
        return "\n".join(map(_row_of, shares))
    process, only_last = shares[0].process, ""
    if process is None:  # by a version that recorded the last process alone
        process = {key: record.get(key, NOT_RECORDED) for key in ("device", "commit")}
        process["versions"] = record.get("versions", {})
        only_last = f" (of the last process; whether others took steps before: {NOT_RECORDED})"
    return f"""\
| device | {_devices(process)}{only_last} | |
| libraries | {_libraries(process)}{only_last} | |
| commit of bam's code | {process["commit"]}{only_last} | |"""


def _row_of(share: Share) -> str:
    first, last, process = share
    steps = f"steps {first} to {last}" if first < last else f"step {first}"
    if last < first:
        steps = f"steps from {first} on, all taken again later"
    said = NOT_RECORDED
    if process:
        said = f"by bam's code at commit {process['commit']}; on {_devices(process)}; with "
        said += _libraries(process)
    return f"| {steps}, of those begun | {said} | |"


def _devices(process: JsonMapping) -> str:
    """Number and kind of devices."""
    num, hosts = process.get("num_devices", 1), process.get("num_processes", 1)
    several = f"{num} × " if num > 1 else ""
    return f"{several}{process['device']}" + (f", in {hosts} processes at once" * (hosts > 1))


def _libraries(process: JsonMapping) -> str:
    """Names and versions."""
    return ", ".join(f"{name} {version}" for name, version in process["versions"].items())


def unaccounted(config: JsonMapping, summary: JsonMapping, diagnosed: bool) -> str:
    """What was looked at that ε does not cover."""
    unknown, declared = "not known to this file", "which whoever trained declares"
    made, chosen = f"{declared} made without these data", bool(summary.get("selection"))
    holdout, evaluated = config["dataset"].get("holdout", 0), config["eval"]["every"]
    weights, name = (
        config.get("loss", {}).get("weights"),
        config.get("features", {}).get("name", ""),
    )
    measured, aside, clip_norm, begun = (
        "none in the run's records",
        "none",
        "a setting",
        "at random",
    )
    if config["diagnostics"]["every"] or diagnosed:
        measured = "**yes**: losses, norms and clipping bias were measured and shown in training"
    if holdout:
        covered = "ε covers this choice by them" if chosen else "no ε covers them"
        aside = f"""**{holdout}** were set aside and stood in for test examples; they are not among
the N, and {covered}""".replace("\n", " ")
    tested = f"every {evaluated} steps and at the end" if evaluated else "at the end"
    tested = "none was measured" if chosen and holdout else tested
    searched = "**yes**, by the search that ε pays for"
    if config["public_clip"]["quantile"]:
        clip_norm = f"from another data set, {declared} public"
    if digest := summary.get("init_digest"):
        begun = f"**in a file** (SHA-256 {digest}), {made}"
    elif network := parts_of(config).get("model.name"):
        begun = f"**as `{network}` makes them**, {made}"
    if frozen := summary.get("num_frozen"):
        begun += f"; {frozen} of {frozen + summary['num_params']} were left as they began"
    class_weights = f"**{list(weights)}**, {declared} public" if weights else "none"
    if loss := parts_of(config).get("loss.name"):
        class_weights = f"{unknown}: the loss `{loss}` is the caller's own"
    seen = f"by `{name}`, a fixed map of each image alone, made without these data"
    if ":" in name:
        seen = f"**by `{name}`**, {made}"
    elif name == "prior":
        seen = "by `prior`, a fixed map of each image alone, learned from drawn images"
    elif digest := summary.get("features_digest"):
        seen = f"**by `{name}`**, a frozen network of the weights of SHA-256 {digest}, {made}"
    return f"""\
ε does not cover what follows: people may have seen it, and acted on it. What is "not known to this
file" is for whoever releases the model to say.

| what | in this run |
|---|---|
| figures of training examples | {measured} |
| training examples held out | {aside} |
| accuracy on test examples | {tested}; test examples are not protected |
| C, the clip norm | {clip_norm} |
| weights of the classes in the loss | {class_weights} |
| weights before training | {begun} |
| features of the examples | {seen if name else "none: the examples themselves"} |
| constants that normalise the inputs | taken as public, whatever they were computed from |
| hyper-parameters chosen by looking at this data | \
{f"{searched}; others: {unknown}" if chosen else unknown} |
| this run chosen among several | {searched if chosen else unknown} |
| other releases from the same data | {unknown} |"""


def nist(plan: PrivacyPlan, released: str) -> str:
    """What NIST has an evaluator ask of a claim of differential privacy, where no fact answers it.

    Source: NIST Special Publication 800-226, Guidelines for Evaluating Differential Privacy
    Guarantees (2025).
    """
    chosen = "by the search that ε pays for" if plan.selection else "not known to this file"
    return f"""\
## What NIST SP 800-226 asks of such a claim

"Facts" has the unit of privacy, the neighbouring data sets (adjacency), the privacy parameters (ε
and δ, of the whole training), the bound on a contribution (S, enforced for each {plan.unit} in each
step) and the randomness. "From whom" has the threat model; "What is not protected" and "Looked at
without accounting" have what is outside; "Check it" says how it can be checked. What is left:

| question | answer |
|---|---|
| who chose ε and δ | whoever trained, before training; they are public |
| other parameters | settings, all public; chosen by looking at these data: {chosen} |
| trust model | central: whoever trained saw the data; what is released is {released} |
| side channels | **outside**: how long training took, its memory, screen and logs; rounding is \
none, since sums and noise are of integers |
| several releases | their ε add up; others than this one are not known to this file |"""


def event(
    plan: PrivacyPlan, noise_multiplier: float, sampling_prob: float, num_steps: int
) -> dp_event.DpEvent:
    """What ε is computed from, as dp-accounting has it: so many steps, or a choice of trials."""
    training = accounting.poisson_event(noise_multiplier, sampling_prob, num_steps)
    if not (choice := plan.selection):
        return training
    score = dp_event.GaussianDpEvent(choice.score_noise_multiplier)
    trial = dp_event.ComposedDpEvent([training, score])
    return dp_event.RepeatAndSelectDpEvent(trial, choice.trials_mean, choice.trials_shape)


def recomputation(plan: PrivacyPlan) -> str:
    """Three lines of Python that compute ε again without bam, and how to read them."""
    delta, steps, bands = plan.delta - plan.overflow, plan.dp_event, len(plan.mechanism.strategy)
    notes = f"\nTheir δ is less by {plan.overflow:g}, for draws that outgrow their rows"
    notes += ", and by 2⁻⁵¹ a step for rounding." if plan.accountant == "pld" and steps else "."
    package, own = "Google's dp-accounting (`pip install dp-accounting`)", ""
    if bands > 1:
        notes += f"""
The noise is correlated over {bands} steps, and the data are in {bands} parts that take turns. For
any one {plan.unit} that is worth one Poisson-sampled step of independent noise in {bands}: as many
as T/{bands}, rounded up, with probability {bands}q, and with σ over the norm of what the noise of a
step is made of (see "noise"). These numbers are what the lines have."""
    if steps is None:
        sigma, batches = plan.noise_multiplier, plan.mechanism.period
        epochs, package = -(-plan.num_steps // batches), "PLD_accounting (`pip install` it)"
        spacing, truncation = random_allocation.settings(sigma, batches, epochs, delta)
        lines = f"""\
from PLD_accounting import *
run = PrivacyParams(sigma={sigma}, num_steps={batches}, num_epochs={epochs}, delta={delta})
print(gaussian_allocation_epsilon_configurable(params=run, config=AllocationSchemeConfig(\
loss_discretization={spacing}, tail_truncation={truncation})))"""
    else:
        name, less = "PLDAccountant", f" - {steps.num_steps} * {pld.ROUNDING}"
        if plan.accountant == "rdp":
            name, less = "RdpAccountant", ""
            notes += "\nWarnings name orders that are left out."
        lines = f"""\
from dp_accounting.dp_event import *
from dp_accounting.{plan.accountant} import {name}
print({name}().compose({event(plan, *steps)!r}).get_epsilon({delta}{less}))"""
        flags = " ".join(f"--{key}={value}" for key, value in steps._asdict().items())
        own = f"""

With bam, this prints ε, this training's own limits (column "composed") and its μ:

```console
bam privacy {flags} --delta={delta}
```"""
    return f"""\
These lines compute ε from the noise, the batches, T and δ without bam, by
{package}. They print {plan.epsilon}, but for late digits.{notes}

```python
{lines}
```{own * (not plan.selection)}"""
