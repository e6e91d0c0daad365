"""What NIST SP 800-226 has an evaluator ask of a claim of differential privacy, line by line.

Source: NIST Special Publication 800-226, Guidelines for Evaluating Differential Privacy Guarantees
(2025).
"""

from bam.files import JsonObject
from bam.privacy.mechanisms import ADJACENCIES, adjacency_of
from bam.privacy.units import unit_of, worded


def answers(plan: JsonObject, summary: JsonObject) -> str:
    """The section of `PRIVACY.md`, of a recorded plan and the run's summary."""
    unit = unit_of(plan)
    adjacency = worded(ADJACENCIES[adjacency_of(plan)][1], unit.name)
    chosen = "by the search that ε pays for" if plan.get("selection") else "not known to this file"
    rows = {
        "unit of privacy": unit.fact,
        "neighbouring data sets": adjacency,
        "privacy parameters": "ε and δ, of the whole training; see the top",
        "who chose them": "whoever trained, before training; they are public",
        "bound on a contribution": f"S, see the facts, enforced for each {unit.name} in each step",
        "other parameters": f"settings, all public; chosen by looking at these data: {chosen}",
        "trust model": "central: whoever trained saw the data; this folder is what is released",
        "threat model": "anyone with this folder, any knowledge and any computing, short of the "
        "random numbers",
        "side channels": "**outside**: how long training took, its memory, screen and logs; sums "
        "and noise are of integers, so that rounding tells nothing",
        "randomness": f"{summary['noise_key']}; ChaCha20",
        "several releases": "their ε add up; others than this one are not known to this file",
        "outside": 'see "What is not protected" and "Looked at without accounting"',
        "how it can be checked": 'the commands under "Check it", one of them without this program',
    }
    lines = "\n".join(f"| {question} | {answer} |" for question, answer in rows.items())
    return f"""\
## What NIST SP 800-226 asks of such a claim

| question | answer |
|---|---|
{lines}"""
