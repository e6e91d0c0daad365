"""`PRIVACY.md`: the guarantee of a released model, in words and in numbers that can be recomputed.

The words are in `PRIVACY.md.template`, beside this file. The fields of a training choose among
them: call `fields_of_run` or `fields_of_own_loop`, then `text_of`. `string.Template` fills them in,
because a user's own loop writes the same statement without any extra, and so without Jinja. Numbers
are rounded to the side that claims less: ε, δ and q up, noise down.
"""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from importlib import resources
from string import Template
from typing import NamedTuple

from bam import part_table, provenance
from bam.core import slots
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.part_table import BEST_OF_TRIALS
from bam.privacy import accounting, ledger, pld, random_allocation, selection, tradeoff
from bam.privacy.plan import PrivacyPlan
from bam.privacy.rounding import round_down, round_up
from bam.privacy.run import PrivateRun
from bam.privacy.tradeoff import most_power
from bam.text import quote

# False positive rates at which the power of the best test is stated.
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05)
MOST_NAMED = 20  # classes whose names are listed
FOLDER = "this folder"  # the release, if `bam export` writes it


class Text(NamedTuple):
    """A text of the template.

    Attributes:
      field: the name of the field that it depends on; None if it depends on none.
      choices: value of the field -> words.
    """

    field: str | None
    choices: dict[str | None, str]


def texts_of(template: str) -> dict[str, Text]:
    """Returns the texts of a template, by name.

    The template's head describes its format.
    """
    head = r"^## \[(\w+)(?: if (\w+) = (.+))?\]$"
    _, *parts = re.split(head, template, flags=re.MULTILINE)
    texts: dict[str, Text] = {}
    for name, field, value, body in zip(*(parts[i::4] for i in range(4)), strict=True):
        texts.setdefault(name, Text(field, {})).choices[value] = body.strip("\n")
    return texts


TEMPLATE = resources.files("bam.privacy").joinpath("PRIVACY.md.template")
TEXTS = texts_of(TEMPLATE.read_text(encoding="utf-8"))
NOT_RECORDED = TEXTS["not_recorded"].choices[None]
# Parts that may be a user's code, with conditions for ε to hold: each config key that can name a
# MODULE:FUNCTION, and the two parts that a user's own loop brings.
PARTS = tuple(str(key) for key in TEXTS["part"].choices)
# A publisher's answers to which rows of the tables refer: the field, and the question of the form.
ANSWERED = {
    "settings_answered": "Choice of hyper-parameters",
    "runs_answered": "Other runs on the same data",
    "releases_answered": "Other releases from the same data",
    "epsilon_answered": "Choice of ε and δ",
}


def render(fields: JsonMapping, name: str) -> str:
    """Returns a text of the template with its fields filled in.

    KeyError for a missing field, or a value without words. Fields are put in last and are not read
    again, so a record with a `$` in it stays as it is.
    """
    field, choices = TEXTS[name]
    words = choices[None if field is None else str(fields[field])]
    names = Template(words).get_identifiers()
    # A name is either another text of the template or a field.
    filled = {x: render(fields, x) if x in TEXTS else str(fields[x]) for x in names}
    for x in names:
        if not filled[x]:  # an empty text on a line of its own leaves no line
            words = re.sub(rf"\n+\${x}$", "", words, flags=re.MULTILINE)
    return Template(words).substitute(filled)


def text_of(fields: JsonMapping) -> str:
    """Returns the text of `PRIVACY.md`, in Markdown."""
    return render(fields, "statement") + "\n"


def nominal_notice(epsilon: float) -> str:
    """Returns the notice that stands above all else for a training with a seed."""
    return render({"seeded": True, "epsilon": round_claim(epsilon)}, "nominal")


def round_claim(value: float) -> str:
    """Returns a claimed number in four digits, never below it, as `bam.privacy.rounding` has it."""
    return round_up(value, ".4g")


def own_power(plan: PrivacyPlan, num_steps: int) -> Callable[[float], float] | None:
    """Returns the power of the best test against `num_steps` steps of this training: α -> power.

    It is computed from the composed privacy loss, and never above `most_power`. None if no
    Poisson-sampled Gaussians are known to dominate the steps, for the trial of a search, and if the
    noise multiplier of these Gaussians is below 0.1.
    """
    event = plan.dp_event_after(num_steps)
    if event is None or event.noise_multiplier < accounting.LEAST_PLD_NOISE:
        return None
    # Up to 1.5 ε, because the trade-off function is only as good as the ε it is computed at.
    epsilon = plan.epsilon_after(num_steps)
    with warnings.catch_warnings(action="ignore", category=pld.LooseBoundWarning):
        f = accounting.poisson_tradeoff(up_to=max(1.0, 1.5 * epsilon), **event._asdict())

    def power(false_positive_rate: float) -> float:
        composed = tradeoff.best_true_positive_rate(f, false_positive_rate) + plan.overflow
        return min(composed, most_power(epsilon, plan.delta, false_positive_rate))

    return power


def fields_of_run(
    config: JsonMapping,
    plan: PrivacyPlan,
    summary: JsonMapping,
    *,
    diagnosed: bool,
    own_parts: Mapping[str, str] | None = None,
    notes: Mapping[str, str] | None = None,
    **words: str,
) -> JsonObject:
    """Returns the fields of a finished run of `bam train`.

    Args:
      config: the settings that may be published.
      plan: of the run.
      summary: the content of `summary.json`.
      diagnosed: whether the records hold figures of training examples.
      own_parts: as in `training_fields`; None takes them from `config`.
      notes: the publisher's answer to each question, "" without one; None if there is no form.
      **words: `data`, `exported_by` and `released` of `training_fields`.
    """
    parts = parts_of(config) if own_parts is None else own_parts
    names = {key: config[key].get("name", NOT_RECORDED) for key in ("method", "clip")}
    return {
        **training_fields(plan, summary, own_parts=parts, clip=names["clip"], **words),
        **fields_on_other_uses(config, summary, diagnosed, is_searched(plan)),
        **fields_of_notes(notes or {}),
        "trained_by": "bam train",
        "method": names["method"],
    }


def of_own_loop(
    run: PrivateRun, sensitivity: float, is_proved: bool, num_slots: int, data: str
) -> str:
    """Returns the statement of a training in a user's own loop.

    Its clip is one of bam's if `is_proved`, and has `num_slots` slots. InputError for a plan
    without privacy.
    """
    mechanism = run.plan.mechanism
    if not run.plan.private:
        raise InputError("a training without privacy has no PRIVACY.md")
    record = {
        "seed": run.seed,
        "clip_norm": None,  # only S is known
        "sensitivity": sensitivity,
        "sampling": mechanism.sampling,
        "noise": mechanism.noise,
        "noise_key": "operating system" if run.seed is None else "seed",
        "num_slots": num_slots,
        "steps_begun": run.steps_begun,
        "processes": run.processes or [ledger.this_process(1, run.num_devices)],
    }
    by = f"bam {provenance.versions()['bam']}, commit {provenance.git_commit()}"
    fields = fields_of_own_loop(run.plan, record, is_proved=is_proved, data=data, exported_by=by)
    return text_of(fields)


def fields_of_own_loop(
    plan: PrivacyPlan, record: JsonMapping, *, is_proved: bool, data: str, exported_by: str
) -> JsonObject:
    """Returns the fields of a training in a user's own loop.

    Its clip is one of bam's if `is_proved`.
    """
    parts = {"oracle": ""} if is_proved else {"oracle": "", "clip": ""}
    words = {"data": data, "exported_by": exported_by, "released": "the weights"}
    return {
        **training_fields(plan, record, own_parts=parts, clip="", **words),
        **fields_of_notes({}),
        "labels_scaled": True,  # not known here: the caller may have scaled them
        "trained_by": "own loop",
    }


def fields_of_notes(notes: Mapping[str, str]) -> JsonObject:
    """Returns the fields of a publisher's answers, see `fields_of_run`.

    Without a form there are no answers.
    """
    answers = [
        render({"question": question, "words": quote(words)}, "answer")
        for question, words in notes.items()
        if words
    ]
    unanswered = [question for question, words in notes.items() if not words]
    return {
        "has_notes": bool(notes),
        "answers": "\n\n".join(answers),
        "all_answered": not unanswered,
        "unanswered": "; ".join(unanswered),
        **{field: bool(notes.get(question)) for field, question in ANSWERED.items()},
    }


def parts_of(config: JsonMapping) -> dict[str, str]:
    """Returns the config's keys in `PARTS` that name a MODULE:FUNCTION, with the name."""
    parts = {}
    for key in PARTS:
        section, _, name = key.partition(".")
        options = config.get(section)
        value = options.get(name) if name and isinstance(options, Mapping) else ""
        if isinstance(value, str) and ":" in value:
            parts[key] = value
    return parts


def training_fields(
    plan: PrivacyPlan,
    record: JsonMapping,
    *,
    own_parts: Mapping[str, str],
    clip: str,
    data: str,
    exported_by: str,
    released: str = FOLDER,
) -> JsonObject:
    """Returns the fields of any training, whose texts have one line each.

    Args:
      plan: of the training.
      record: the training's record: seed, clip_norm (None if the clip has none), sensitivity,
        sampling, noise, noise_key, the steps begun and taken, and the `processes` that took them
        (`bam.privacy.ledger`). A run without them has the last process's `device`, `versions` and
        `commit`. If the clip has slots, also their number `num_slots`, or `gradient_norms`.
      own_parts: keys of `PARTS` that are a user's code, with its name or "".
      clip: name of the clip.
      data: a description of the data set that may be published.
      exported_by: version and commit of the code that writes the statement.
      released: the released object, if it is not a folder of `bam export`.
    """
    shares = shares_of(record)
    # An own loop records no name of its clip.
    is_proved_own_loop = "oracle" in own_parts and "clip" not in own_parts
    std = plan.noise_multiplier * record["sensitivity"]
    row = part_table.row("clip", clip)
    return {
        **_plan_fields(plan),
        **_norms_fields(record),
        "clip_norm": record["clip_norm"],
        "clip_norm_known": record["clip_norm"] is not None,
        **_recomputation_fields(plan),
        "data": data,
        "exported_by": exported_by,
        "released": released,
        "is_folder": released == FOLDER,
        "seeded": record["seed"] is not None,
        "noise_key": record["noise_key"],
        "noise": record["noise"],
        "sampling": record["sampling"],
        "sensitivity": record["sensitivity"],
        "exact_std": std,
        "std": round_down(std, ".4g"),
        "steps_begun": record.get("steps_begun", NOT_RECORDED),
        "steps_taken": record.get("steps_taken", NOT_RECORDED),
        "clip": clip,
        "bound": "proved" if is_proved_own_loop else "in words" if row and row.words else "own",
        "clip_words": row.words if row else "",
        "own_parts": "some" if own_parts else "none",
        "parts": "; ".join(_part(key, name) for key, name in own_parts.items()),
        "num_codes": "one" if len(shares) == 1 else "several",
        "taken_by": taken_by(record),
    }


def _norms_fields(record: JsonMapping) -> JsonObject:
    """Returns the fields of the slots in a clip.

    They are the share that the slots tell, or their number alone.
    """
    if num_slots := record.get("num_slots", 0):  # of a loop of one's own, which has no summary
        return {"norms": "covered", "num_slots": num_slots}
    norms = record.get("gradient_norms")
    if not isinstance(norms, Mapping):
        return {"norms": "none"}
    try:
        clipped = slots.Share(*map(float, norms["share_clipped"]))
    except (KeyError, TypeError, ValueError):  # in an untrusted summary
        return {"norms": "none"}
    return {"norms": "told", "num_slots": len(norms) - 1, "norms_clipped": str(clipped)}


def _plan_fields(plan: PrivacyPlan) -> JsonObject:
    """Returns the fields of a plan: its numbers and choices."""
    epsilon, delta, n, mu = plan.epsilon, plan.delta, plan.num_examples, plan.mu
    prob = plan.mechanism.sampling_prob
    powers: list[Callable[[float], float]]
    powers = [lambda rate: most_power(epsilon, delta, rate)]
    composed = None if mu is None else own_power(plan, plan.num_steps)
    if composed:
        powers.insert(0, composed)
    rows = [
        (f"{100 * x:g}", *(round_claim(100 * f(x)) for f in powers)) for x in FALSE_POSITIVE_RATES
    ]
    fields = {
        "recognised": round_claim(100 * powers[0](0.01)),
        "unit": plan.unit,
        "group_size": plan.group_size,
        "num_examples": n,
        "num_examples_given": plan.num_examples_given,
        "adjacency": plan.adjacency,
        "exact_epsilon": epsilon,
        "epsilon": round_claim(epsilon),
        "exact_delta": delta,
        "delta": round_claim(delta),
        "delta_of_one": round_down(1 / n, ".2g"),
        # The guarantee of a person with two units, by group privacy.
        "epsilon_of_two": round_claim(2 * epsilon),
        # From ε = 700 on it is 1 for every δ, and from 710 on `exp` overflows.
        "delta_of_two": round_claim(min(1, (1 + math.exp(min(epsilon, 700))) * delta)),
        "mu_known": bool(mu),
        "own_limit": composed is not None,
        "powers": "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "accountant": plan.accountant,
        "mechanism": plan.mechanism_name,
        "batch_size": plan.expected_batch_size,
        # Otherwise batches divide the data, and q is 1/b.
        "q_is": "l/N" if prob == plan.sampling_prob else "1/b",
        "average_batch_size": n * prob,
        "exact_q": prob,
        "q": round_claim(prob),
        "num_steps": plan.num_steps,
        "exact_sigma": plan.noise_multiplier,
        "sigma": round_down(plan.noise_multiplier, ".4g"),
        "searched": is_searched(plan),
    }
    if mu is not None:
        fields |= {"exact_mu": mu, "mu": round_claim(mu)}
    if is_searched(plan):
        trials = plan.mechanism_options
        fields |= {"exact_trials_mean": trials["trials_mean"]}
        fields |= {"trials_mean": f"{trials['trials_mean']:g}"}
        fields |= {"trials_shape": trials["trials_shape"]}
        fields |= {"score_noise": trials["score_noise_multiplier"]}
    return fields


def is_searched(plan: PrivacyPlan) -> bool:
    """Returns whether ε is that of a search, and this run is one of its trials."""
    return plan.mechanism_name == BEST_OF_TRIALS


def _part(key: str, name: str) -> str:
    """Returns a part that is a user's code, with the condition that it must meet."""
    return render({"part_of": key, "named": f" `{name}`" if name else ""}, "part")


class Share(NamedTuple):
    """Consecutive begun steps, taken by processes with the same code, libraries and devices.

    Attributes:
      first: the first step.
      last: the last step; less than `first` if later processes repeated all of them.
      process: the record of `bam.privacy.ledger.this_process`; None if there is none.
    """

    first: int
    last: int
    process: JsonObject | None


def shares_of(record: JsonMapping) -> list[Share]:
    """Returns the shares of a training's steps, in order, from its record's `processes`.

    Without a seed, each process begins after the last begun step of the one before. With a seed, a
    process repeats the steps that the one before had not saved.
    """
    recorded, last = record.get("processes"), record.get("steps_begun")
    if not ledger.are_processes(recorded) or type(last) is not int:
        return [Share(1, 0, None)]
    shares: list[Share] = []
    # From the last process to the first: each took the steps up to where the next one began.
    for process in reversed(recorded):
        first = process["first_step"]
        # If `first` is above `last`, the process took no step, or, with a seed, later processes
        # repeated all its steps. No process is later than the last one, so that one took none.
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
    """Returns whether two processes differ only in their first step."""
    return {**one, "first_step": 0} == {**other, "first_step": 0}


def taken_by(record: JsonMapping) -> str:
    """Returns the rows on code, libraries and devices of all steps."""
    shares = shares_of(record)
    if len(shares) > 1:
        return "\n".join(map(_row_of, shares))
    if process := shares[0].process:
        return render({"recorded": "the only process"} | _process_fields(process), "process")
    # An earlier version recorded only the last process.
    process = {key: record.get(key, NOT_RECORDED) for key in ("device", "commit")}
    process["versions"] = record.get("versions", {})
    return render({"recorded": "the last process"} | _process_fields(process), "process")


def _row_of(share: Share) -> str:
    first, last, process = share
    num_steps = "several" if first < last else "one" if first == last else "none"
    fields = {"first": first, "last": last, "which": num_steps, "recorded": "nothing"}
    if process:
        fields |= {"recorded": "one of several"} | _process_fields(process)
    return render(fields, "process")


def _process_fields(process: JsonMapping) -> JsonObject:
    """Returns the fields of a process: code, libraries with versions, devices with their number."""
    num, hosts = process.get("num_devices", 1), process.get("num_processes", 1)
    return {
        "commit": process["commit"],
        "libraries": ", ".join(f"{name} {x}" for name, x in process["versions"].items()),
        "device": (f"{num} × " if num > 1 else "") + process["device"],
        "num_processes": hosts,
        "at_once": "several processes" if hosts > 1 else "one process",
    }


def fields_on_other_uses(
    config: JsonMapping, summary: JsonMapping, diagnosed: bool, searched: bool
) -> JsonObject:
    """Returns fields on uses of the data that ε does not cover, in a run of `bam train`."""
    holdout, every = config["dataset"].get("holdout", 0), config["eval"]["every"]
    weights = config.get("loss", {}).get("weights")
    features = config.get("features", {}).get("name", "")
    feature_map = part_table.row("features", features)
    features_words = feature_map.words if feature_map else ""
    parts, num_frozen = parts_of(config), summary.get("num_frozen")
    preprocessing = summary.get("preprocessing")
    target = preprocessing.get("target") if isinstance(preprocessing, Mapping) else None
    target = target if isinstance(target, list | tuple) else ()
    recorded = summary.get("classes")
    names = [f"`{x}`" for x in recorded] if isinstance(recorded, list) else []
    more = f" and {len(names) - MOST_NAMED} more in `model.json`" * (len(names) > MOST_NAMED)
    origin = config.get("clip_norm_from")  # None: a text that may not be published
    fields = {
        "diagnosed": bool(config["diagnostics"]["every"] or diagnosed),
        "num_held_out": holdout,
        "holdout": ("covered" if searched else "not covered") if holdout else "none",
        "tests": "in training" if every else "at the end",
        "tested_every": every,
        "clip_norm_given": "from elsewhere" if origin else "by hand",
        "clip_norm_origin": origin,
        "weighted": "by a setting" if weights else "none",
        "weights": list(weights or ()),
        "classes_named": bool(names),
        "class_names": ", ".join(names[:MOST_NAMED]) + more,
        "labels_scaled": bool(target),
        "target_numbers": " and ".join(map(str, target)),
        "init": "at random",
        "frozen": bool(num_frozen),
        "features": "in words" if features_words else "declared" if features else "none",
        "features_name": features,
        "features_words": features_words,
        "features_weights_known": False,
    }
    if origin is None:
        fields["clip_norm_given"] = "not told"
    if searched and holdout:
        fields["tests"] = "none"
    if loss := parts.get("loss.name"):
        fields |= {"weighted": "by its own loss", "loss": loss}
    if digest := summary.get("init_digest"):
        fields |= {"init": "in a file", "init_digest": digest}
    elif network := parts.get("model.name"):
        fields |= {"init": "by its own model", "model": network}
    if num_frozen:
        fields |= {"num_frozen": num_frozen, "num_weights": num_frozen + summary["num_params"]}
    if ":" not in features and (digest := summary.get("features_digest")):
        fields |= {"features_weights_known": True, "features_digest": digest}
    return fields


def _recomputation_fields(plan: PrivacyPlan) -> JsonObject:
    """Returns fields for the lines of Python that compute ε again without bam."""
    delta, steps, bands = plan.delta - plan.overflow, plan.dp_event, len(plan.mechanism.strategy)
    event = plan.mechanism.event(plan.noise_multiplier, plan.num_steps)
    is_allocated = isinstance(event, random_allocation.AllocatedGaussianDpEvent)
    by_profiles = isinstance(event, selection.TrialsDpEvent) and plan.accountant == "pld"
    by = "PLD_accounting" if is_allocated else "profiles" if by_profiles else plan.accountant
    fields = {
        "computed_by": by,
        "overflow": f"{plan.overflow:g}",
        "delta_left": delta,
        "noise_is": "correlated" if bands > 1 else "independent",
        "bands": bands,
        "printed_by_bam": steps is not None,
    }
    if is_allocated:
        sigma, batches = plan.noise_multiplier, plan.mechanism.period
        epochs = -(-plan.num_steps // batches)
        spacing, truncation = random_allocation.settings(sigma, batches, epochs, delta)
        fields |= {"period": batches, "num_epochs": epochs}
        return fields | {"spacing": spacing, "truncation": truncation}
    if by_profiles:
        assert isinstance(event, selection.TrialsDpEvent)
        first, error = selection.epsilon_1(**vars(event))
        fields |= {"epsilon_1": first, "gamma": event.selection.gamma, "profile_error": error}
        return fields | {"event": repr(event.trial())}
    if steps is None:
        return fields | {"event": repr(event.as_dp_accounting())}
    return fields | {
        "event": repr(event),
        "event_sigma": steps.noise_multiplier,
        "event_q": steps.sampling_prob,
        "event_steps": steps.num_steps,
        "rounding": pld.ROUNDING,
    }
