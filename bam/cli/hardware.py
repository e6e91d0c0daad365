"""Compiles a config's step for an absent TPU or GPU, and prints whether it fits."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from absl.flags import FlagValues

from bam import files, waits
from bam.cli import console
from bam.files import JsonMapping
from bam.training import ahead


def main(argv: Sequence[str]) -> int:
    """Runs `bam hardware` with these arguments; returns a status of `options.STATUSES`."""
    return console.command("hardware", argv, compile_ahead)


def compile_ahead(flags: FlagValues) -> None:
    """Compiles the step, prints the answer, and writes it to --json.

    If JAX has not started in this process, it stays on CPU from now on.
    """
    console.check_writable(flags.json)
    hardware = ahead.devices_of(flags.target)
    with waits.awaited(console.show, f"compiling for {flags.target}", stays=False):
        answer = ahead.look(flags.config, flags.target, hardware, flags.size)
    console.say(*lines(answer))
    if flags.json:
        files.write_json(Path(flags.json), answer)


def lines(answer: JsonMapping) -> Iterator[str]:
    """The answer in lines for people."""
    if not answer["compiles"]:
        yield f"does NOT compile: {answer['problem']}"
        return
    yield "compiles in {compile_seconds:.0f} s for {num_devices} × {device}".format(**answer)
    yield "microbatch: {microbatch_size} of {expected_batch_size} examples".format(**answer)
    needed, available = (answer[key] / ahead.GIB for key in ("memory_bytes", "device_memory_bytes"))
    misfit = "" if answer["fits"] else ": DOES NOT FIT"
    yield f"memory of a device: {needed:.2f} of {available:.0f} GiB{misfit}"
    for each in answer["collectives"]:
        yield (
            f"communication in a step: {each['count']} {each['kind']} with {each['bytes']:,} bytes"
        )
    yield f"arithmetic of a step: {answer['flop_per_step'] / 1e12:.4g} TFLOP"
