"""Computes ε of DP-SGD's noise by three accountants (or σ), μ and an attacker's best rates.

With --plan it computes the joint ε of several runs on the same data, or releases, instead.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl.flags import FlagValues

from bam import files, tables
from bam.cli import command, screen
from bam.errors import InputError
from bam.files import JsonObject
from bam.privacy import accounting, pld, tradeoff
from bam.privacy.rounding import round_down, round_up

NAMES = {
    "pld": "PLD (tight)",
    "rdp": "RDP (moments accountant)",
    "gdp": "GDP central limit (asymptotic, NOT a guarantee)",
}
# Bound on an attacker -> its label, and the method whose line style draws it.
TRADEOFFS = {
    "composed": ("the composed mechanism (PLD)", "dp_sgd"),
    "epsilon_delta": ("(ε, δ)-DP alone", "dp_sat"),
    "gdp": ("μ-GDP, central limit (asymptotic)", "bam_sam"),
}
FALSE_POSITIVE_RATES = (0.001, 0.01, 0.05, 0.1)
SPENT: tables.Columns = {
    "step": lambda row: str(row["step"]),
    "PLD": lambda row: round_up(row["pld"], ".4f"),
    "RDP": lambda row: round_up(row["rdp"], ".4f"),
    "GDP (asymptotic)": lambda row: round_up(row["gdp"], ".4f"),
}
RATES: tables.Columns = {
    "false positives": lambda row: f"{row['false_positive_rate']:.1%}",
    "composed (PLD)": lambda row: f"{round_up(100 * row['composed'], '.1f')}%",
    "(ε, δ) alone": lambda row: f"{round_up(100 * row['epsilon_delta'], '.1f')}%",
    "μ-GDP (asymptotic)": lambda row: f"{round_up(100 * row['gdp'], '.1f')}%",
}
NUM_POINTS = 10  # steps at which ε is computed


def main(argv: Sequence[str]) -> int:
    """Runs `bam privacy` with these arguments and returns a status of `options.STATUSES`."""
    return command.run("privacy", argv, account)


def account(flags: FlagValues) -> None:
    """Prints ε (or σ), ε over the steps and the best rates of an attacker.

    With `--plan`, it prints ε of several runs instead.
    """
    if flags.plan:
        return account_for_all(
            flags.plan, flags.delta if flags["delta"].present else None, flags.json
        )
    sampling_prob, num_steps = flags.sampling_prob, flags.num_steps
    if not 0 < sampling_prob <= 1:
        raise InputError(f"--sampling_prob={sampling_prob:g} must be above 0 and at most 1")
    sigma = flags.noise_multiplier
    if sigma is None:
        sigma = accounting.noise_multiplier(
            target_epsilon=flags.target_epsilon,
            delta=flags.delta,
            accountant=flags.accountant,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
        )
    if not 0 < sigma < math.inf:
        raise InputError(f"--noise_multiplier={sigma:g} must be positive and finite")
    for file in (flags.json, flags.plot):
        files.check_writable(file)
    analysis = analyse(sigma, sampling_prob, num_steps, flags.delta)
    if flags.json:
        files.write_json(Path(flags.json), analysis)
    if flags.plot:
        draw(analysis, Path(flags.plot))
    screen.show(
        f"σ = {round_down(sigma, '.5g')}, q = {round_up(sampling_prob, 'g')}, T = {num_steps}, "
        f"δ = {round_up(analysis['delta'], 'g')}, neighbours: zero-out of one example\n"
    )
    for name in accounting.ACCOUNTANTS:
        screen.say(f"ε = {round_up(analysis['epsilon'][name], '8.4f')}   {NAMES[name]}")
    screen.say(
        f"μ = {round_up(analysis['mu_bound'], '8.4f')}   Gaussian DP, but for δ (PLD, from above)"
    )
    screen.say(
        f"μ = {analysis['mu']:8.4f}   by the central limit theorem (asymptotic, NOT a guarantee)",
        "",
    )
    screen.table(SPENT, analysis["over_training"], "ε as training goes")
    rates = analysis["best_true_positive_rate"]
    screen.table(RATES, rates, "an attacker's best true positive rate")


def account_for_all(names: Sequence[str], delta: float | None, json: str) -> None:
    """Prints ε of each run, the joint ε of all runs at `delta`, and the sums of their ε and δ.

    `names` are files `plan.json`, or folders of runs or releases that hold one. `delta` of None is
    the largest δ of the plans. `json` is a file to write, or "".
    """
    from bam.privacy.joint_epsilon import joint_epsilon
    from bam.privacy.mechanisms import ADJACENCIES  # these import JAX, which takes seconds
    from bam.privacy.recorded_plan import PLAN, read_plan

    paths = [Path(name) / PLAN if Path(name).is_dir() else Path(name) for name in names]
    if "" in names:
        raise InputError("--plan= is empty: give plan.json of a run or a release, or its folder")
    for name, path in zip(names, paths, strict=True):
        if Path(name).is_dir() and not path.exists():
            raise InputError(
                f"--plan={name} has no {PLAN}, like a release by an earlier version: give the "
                "run's folder, or export the run again"
            )
    if len(records := {path.resolve() for path in paths}) < len(paths):
        raise InputError("--plan names one run twice: name each run once")
    if json and Path(json).resolve() in records:
        raise InputError(f"--json={json} would overwrite a run's plan: choose another file")
    files.check_writable(json)
    plans = [read_plan(path) for path in paths]
    num_different = len({path.read_bytes() for path in paths})
    rows: list[JsonObject] = [
        {"plan": name, "epsilon": plan.epsilon, "delta": plan.delta}
        for name, plan in zip(names, plans, strict=True)
    ]
    delta = max(plan.delta for plan in plans) if delta is None else delta
    together: JsonObject = {"plan": "together", "epsilon": joint_epsilon(plans, delta)}
    together["delta"] = delta
    total: JsonObject = {"plan": "their sum"}
    total |= {key: sum(row[key] for row in rows) for key in ("epsilon", "delta")}
    if json:
        record = {"unit": plans[0].unit, "plans": rows, "together": together, "sum": total}
        files.write_json(Path(json), record)
    neighbours = ADJACENCIES[plans[0].adjacency][1].format(unit=plans[0].unit)
    screen.show(f"Runs on the same data: {len(plans)}, neighbours: {neighbours}\n")
    for row in (*rows, together, total):
        epsilon, its_delta = round_up(row["epsilon"], "8.4f"), round_up(row["delta"], "g")
        screen.say(f"ε = {epsilon}   δ = {its_delta}   {row['plan']}")
    if num_different < len(plans):
        screen.say("", "two plans are equal: if they are of one training, name it once")
    screen.say(
        "",
        "This holds if nobody can guess the seed of a run, and no two runs had the same seed: with "
        "one seed they share noise.",
    )


def analyse(sigma: float, sampling_prob: float, num_steps: int, delta: float) -> JsonObject:
    """All numbers that are printed or drawn, as a JSON object."""
    mechanism = {"noise_multiplier": sigma, "sampling_prob": sampling_prob}

    def epsilons(steps: int) -> dict[str, float]:
        return {
            name: accounting.epsilon(num_steps=steps, delta=delta, accountant=name, **mechanism)
            for name in accounting.ACCOUNTANTS
        }

    total = epsilons(num_steps)
    points = sorted({max(1, round(num_steps * i / NUM_POINTS)) for i in range(1, NUM_POINTS + 1)})
    mu = tradeoff.mu_of_noisy_sgd(sigma, sampling_prob, num_steps)
    tradeoffs = {
        "composed": accounting.poisson_tradeoff(
            num_steps=num_steps, up_to=max(1.0, 1.5 * total["pld"]), **mechanism
        ),
        "epsilon_delta": tradeoff.epsilon_delta_tradeoff(total["pld"], delta),
        "gdp": tradeoff.gaussian_tradeoff(mu),
    }
    alpha = np.linspace(0, 1, 501)
    return {
        **mechanism,
        "num_steps": num_steps,
        "delta": delta,
        "mu": mu,
        "mu_bound": pld.mu(sigma, sampling_prob, num_steps, up_to=total["pld"]),
        "epsilon": total,
        "over_training": [{"step": steps, **epsilons(steps)} for steps in points],
        "best_true_positive_rate": [
            {"false_positive_rate": rate}
            | {name: tradeoff.best_true_positive_rate(f, rate) for name, f in tradeoffs.items()}
            for rate in FALSE_POSITIVE_RATES
        ],
        "tradeoff": {"type_1_error": alpha.tolist()}
        | {name: f(alpha).tolist() for name, f in tradeoffs.items()},
    }


def draw(analysis: JsonObject, path: Path) -> None:
    """Draws trade-off curves beside ε over training, from the numbers of `analyse`."""
    from bam.sweep.plot import STYLES, Line, Panel, panels  # it needs the extra `plots`

    alpha = analysis["tradeoff"]["type_1_error"]
    lines = [
        Line(label, alpha, analysis["tradeoff"][name], None, STYLES[method])
        for name, (label, method) in TRADEOFFS.items()
    ]
    guess = [1 - a for a in alpha]
    lines.append(Line("guessing", alpha, guess, None, STYLES["non_private"]))
    steps = [row["step"] for row in analysis["over_training"]]
    looks = {
        "pld": TRADEOFFS["composed"],
        "rdp": (NAMES["rdp"], "bam_exact"),
        "gdp": TRADEOFFS["gdp"],
    }
    spent = [
        Line(label, steps, [row[name] for row in analysis["over_training"]], None, STYLES[method])
        for name, (label, method) in looks.items()
    ]
    title = (
        f"σ = {round_down(analysis['noise_multiplier'], '.4g')}, "
        f"q = {round_up(analysis['sampling_prob'], 'g')}, "
        f"T = {analysis['num_steps']}, δ = {round_up(analysis['delta'], 'g')}"
    )
    charts = [
        Panel("type II error against type I error", "type I (false positives)", lines),
        Panel("ε as training goes", "step", spent),
    ]
    panels(charts, path, title, num_columns=2)
