"""What a compiled program says of itself: cycles, memory traffic, kernels and collectives.

XLA's text lists an instruction inside a loop once, so everything is multiplied by the turns of the
loops around it. Some loops' turns depend on the batch; whoever asks says how many those are.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
# Instructions that run nothing on the device.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
}
# Instructions that read as much of their first operand as they return.
PICKS = {"gather", "dynamic-slice", "slice"}
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0}


class Instruction:
    """One line of a computation."""

    def __init__(self, name: str, shape: str, opcode: str, rest: str) -> None:
        self.name, self.shape, self.opcode, self.rest = name, shape, opcode, rest

    def attribute(self, pattern: str) -> str:
        """The first group of a pattern in what follows the operands; "" if it is not there."""
        found = re.search(pattern, self.rest)
        return found[1] if found else ""

    @property
    def cycles(self) -> int:
        """What the TPU compiler expects of it."""
        return int(self.attribute(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def scope(self) -> str:
        """Where in the Python program it comes from."""
        return self.attribute(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Collective:
    """A communication between all devices: so many of it in a step, of so many bytes each."""

    kind: str
    count: float
    num_bytes: int


class Program:
    """A compiled program, from its text."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            if (head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)) and line[0] != " ":
                name = head[2]
                self.computations[name] = []
                self.entry = name if head[1] else self.entry
            elif name and (found := _instruction(line)):
                self.computations[name].append(found)
        if not self.entry:
            raise ValueError("this is not the text of a compiled program")

    def walk(self, turns: Callable[[str], float]) -> Iterator[tuple[Instruction, float, str]]:
        """Every instruction that runs, how often, and the scope of the loop it is in ("": none).

        `turns(scope)` says how often a loop runs that does not count up to a constant.
        """
        yield from self._walk(self.entry, 1, "", turns)

    def _walk(
        self, name: str, times: float, loop: str, turns: Callable[[str], float]
    ) -> Iterator[tuple[Instruction, float, str]]:
        for step in self.computations[name]:
            if step.opcode == "while":
                known = self._known_turns(step)
                inner = times * (known or turns(step.scope))
                inside = loop if known else step.scope
                for called in re.findall(r"(?:body|condition)=%([\w.\-]+)", step.rest):
                    yield from self._walk(called, inner, inside, turns)
            elif step.opcode in ("call", "conditional"):
                called = step.attribute(r"to_apply=%([\w.\-]+)") or step.attribute(
                    r"(?:true_computation|branch_computations)=\{?%([\w.\-]+)"
                )
                if called:
                    yield from self._walk(called, times, loop, turns)
            else:
                yield step, times, loop

    def _known_turns(self, loop: Instruction) -> int:
        """How often a loop runs, by the compiler or by its condition "less than N"; 0: unknown."""
        if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
            return int(known)
        condition = self.computations.get(loop.attribute(r"condition=%([\w.\-]+)"), [])
        numbers = {
            f"%{step.name}": int(step.rest.split(")")[0])
            for step in condition
            if step.opcode == "constant" and step.rest.split(")")[0].isdigit()
        }
        last = condition[-1] if condition else loop
        if last.opcode != "compare" or "direction=LT" not in last.rest:
            return 0
        return numbers.get(last.rest.split(")")[0].rsplit(", ")[-1], 0)

    def holds(self, step: Instruction, opcodes: Sequence[str]) -> bool:
        """Whether an instruction, or one of those that are fused in it, is of some kinds."""
        fused = self.computations.get(step.attribute(r"calls=%([\w.\-]+)"), [])
        return step.opcode in opcodes or any(self.holds(inner, opcodes) for inner in fused)

    def collectives(self, turns: Callable[[str], float]) -> list[Collective]:
        """Those of a step, the largest first; one of several arrays counts as one."""
        found: dict[tuple[str, int], float] = {}
        for step, times, _ in self.walk(turns):
            kind = step.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                size = num_bytes(step.shape)
                if step.opcode.endswith("-start") and step.shape.startswith("(("):
                    size //= 2  # its result lists what goes in and what comes out
                found[kind, size] = found.get((kind, size), 0) + times
        ordered = sorted(found.items(), key=lambda item: -item[0][1])
        return [Collective(kind, count, size) for (kind, size), count in ordered]

    def traffic(self, turns: Callable[[str], float]) -> tuple[float, float]:
        """Kernels of a step, and the bytes that they read and write if nothing stays in a cache."""
        kernels, moved = 0.0, 0.0
        sizes = {
            name: {step.name: num_bytes(step.shape) for step in steps}
            for name, steps in self.computations.items()
        }
        owner = {id(step): name for name, steps in self.computations.items() for step in steps}
        for step, times, _ in self.walk(turns):
            if step.opcode not in FREE:
                known = sizes[owner[id(step)]]
                read: dict[str, int] = {}
                for place, name in enumerate(_names(step.rest)):
                    found = self._read(step, place, known.get(name, 0))
                    read[name] = max(found, read.get(name, 0))
                kernels += times
                moved += times * (num_bytes(step.shape) + sum(read.values()))
        return kernels, moved

    def _read(self, step: Instruction, place: int, size: int) -> int:
        """Bytes that an instruction reads of its operand number `place`, of `size` bytes.

        Of what is only picked from, the data set for one, that is what is picked.
        """
        if step.opcode in PICKS:
            return min(size, num_bytes(step.shape)) if place == 0 else size
        fused = self.computations.get(step.attribute(r"calls=%([\w.\-]+)"), [])
        given = [x for x in fused if x.opcode == "parameter" and x.rest.startswith(f"{place})")]
        return self._read_inside(fused, given[0].name, size) if given else size

    def _read_inside(self, steps: Sequence[Instruction], name: str, size: int) -> int:
        total = 0
        for step in steps:
            for place in (i for i, operand in enumerate(_names(step.rest)) if operand == name):
                if step.opcode == "bitcast":
                    total += self._read_inside(steps, step.name, size)
                else:
                    total += self._read(step, place, size)
        return min(total, size)


def num_bytes(shape: str) -> int:
    """Bytes of an array, or of all arrays of a tuple, from its type as XLA writes it."""
    total = 0.0
    for dtype, sides in re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", shape):
        bits = re.search(r"\d+", dtype)
        width = BYTES.get(dtype, int(bits[0]) / 8 if bits else 0)
        total += width * math.prod(int(side) for side in sides.split(",") if side)
    return int(total)


def _instruction(line: str) -> Instruction | None:
    """`  [ROOT] %name = TYPE opcode(operands), attributes`, where TYPE may be a tuple."""
    head = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else len(rest.split(" ", 1)[0])
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    return Instruction(head[1], shape, opcode, rest)


def _closing(text: str) -> int:
    """Where the parenthesis is closed that the text begins with."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place
    return len(text)


def _names(rest: str) -> list[str]:
    """The operands' names, in order."""
    return re.findall(r"%([\w.\-]+)", rest[: _closing("(" + rest)])
