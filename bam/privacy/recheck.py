"""Commands that compute the ε of a recorded plan again, with bam and without."""

from bam.files import JsonMapping
from bam.privacy import random_allocation
from bam.privacy.plan import PrivacyPlan
from bam.privacy.pld import FINE, ROUNDING

CORRELATED = """
The noise is correlated over {bands} steps, and the data are in {bands} parts that take turns. For
any one example that is worth one Poisson-sampled step of independent noise in {bands}: as many as
T/{bands}, rounded up, with probability {bands}q, and with σ over the norm of what the noise of a
step is made of (see "noise"). These numbers are what the commands have.
"""


def check(plan: JsonMapping) -> str:
    """The commands that compute ε again."""
    sigma, prob, steps = (plan[k] for k in ("noise_multiplier", "sampling_prob", "num_steps"))
    delta = plan["delta"] - (overflow := plan.get("overflow", 0.0))
    less = f"\nThe commands have δ less {overflow:g}, which covers draws that outgrow their rows.\n"
    event, correlated = PrivacyPlan.from_json(plan).dp_event, ""
    if event and plan.get("mechanism") == "banded":
        sigma, prob, steps = event
        correlated = CORRELATED.format(bands=plan["mechanism_options"]["bands"])
    num_examples, batch_size = plan["num_examples"], plan["expected_batch_size"]
    poisson = f"noise_multiplier={sigma}, sampling_prob={prob}, num_steps={steps}, delta={delta}"
    own = f"import bam; print(bam.epsilon({poisson}, accountant='{plan['accountant']}'))"
    rdp = "import dp_accounting as dp; from dp_accounting.rdp import RdpAccountant; "
    if plan.get("mechanism") == "random_allocation":
        batches = num_examples // batch_size
        own = (
            "from bam.privacy.random_allocation import epsilon_of_random_allocation as epsilon; "
            f"print(epsilon(noise_multiplier={sigma}, batches_per_epoch={batches}, "
            f"num_steps={steps}, delta={delta}))"
        )
        epochs = -(-steps // batches)
        spacing, truncation = random_allocation.settings(sigma, batches, epochs, delta)
        alone = (
            f"import PLD_accounting as p; run = p.PrivacyParams(sigma={sigma}, "
            f"num_steps={batches}, num_epochs={epochs}, delta={delta}); "
            f"how = p.AllocationSchemeConfig(loss_discretization={spacing}, "
            f"tail_truncation={truncation}); "
            "print(p.gaussian_allocation_epsilon_configurable(params=run, config=how))"
        )
    elif plan.get("selection"):
        keys = ("trials_mean", "trials_shape", "score_noise_multiplier")
        mean, shape, noise = (plan["selection"][key] for key in keys)
        own = (
            f"from bam.privacy import selection as s; print(s.epsilon(s.Selection({mean}, {shape}, "
            f"{noise}), {poisson}))"
        )
        alone = (
            f"{rdp}step = dp.PoissonSampledDpEvent({prob}, dp.GaussianDpEvent({sigma})); "
            f"trial = dp.ComposedDpEvent([dp.SelfComposedDpEvent(step, {steps}), "
            f"dp.GaussianDpEvent({noise})]); "
            f"best = dp.dp_event.RepeatAndSelectDpEvent(trial, {mean}, {shape}); "
            f"print(RdpAccountant().compose(best).get_epsilon({delta}))"
        )
    elif plan["accountant"] == "pld":
        alone = (
            "from dp_accounting.pld import privacy_loss_distribution as pld; "
            f"step = pld.from_gaussian_mechanism({sigma}, sampling_prob={prob}, "
            f"value_discretization_interval={FINE}); "
            f"composed = step.self_compose({steps}); "
            f"print(composed.get_epsilon_for_delta({delta} - {steps} * {ROUNDING}))"
        )
    else:
        alone = (
            f"{rdp}step = dp.PoissonSampledDpEvent({prob}, dp.GaussianDpEvent({sigma})); "
            f"print(RdpAccountant().compose(step, {steps}).get_epsilon({delta}))"
        )
    warned = "" if plan["accountant"] == "pld" else " (warnings name orders that are left out)"
    attacker = ""
    if event and not plan.get("selection"):
        attacker = f"""
The third, with bam, prints this training's own limits (column "composed") and its μ:

```console
bam privacy --noise_multiplier={sigma} --sampling_prob={prob} --num_steps={steps} \
--delta={delta}
```
"""
    return f"""\
## Check it
{correlated}{less if overflow else ""}
The first command computes ε from the noise, the batches, T and δ, and prints {plan["epsilon"]}:

```console
python -c "{own}"
```

The second does so without bam, and may differ in late digits{warned}:

```console
python -c "{alone}"
```
{attacker}
What q is, and that the noise is σ times S, stands in the table. That
the program does what the table says can be read, and tested, in its code at that commit (where it
says "modified", with changes that are in no commit)."""
