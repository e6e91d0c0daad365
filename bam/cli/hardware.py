"""Compiles a config's step for a TPU or GPU that is not there, and says what its compiler says."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from bam import files, waits
from bam.cli import console
from bam.files import JsonMapping
from bam.training import ahead


def main(argv: Sequence[str]) -> int:
    """`bam hardware` with these arguments; its exit status, of `options.STATUSES`."""
    return console.command("hardware", argv, compile_ahead)


def compile_ahead(given: flags.FlagValues) -> None:
    """Compiles, prints, and writes the answer.

    If JAX has not started in this process, it stays on CPU from now on.
    """
    console.check_writable(given.json)
    hardware = ahead.devices_of(given.target)
    with waits.awaited(console.show, f"compiling for {given.target}", stays=False):
        answer = ahead.look(given.config, given.target, hardware, given.size)
    console.say(*lines(answer))
    if given.json:
        files.write_json(Path(given.json), answer)


def lines(answer: JsonMapping) -> Iterator[str]:
    """The answer as a person reads it, a line for each fact."""
    if not answer["compiles"]:
        yield f"does NOT compile: {answer['problem']}"
        return
    yield "compiles in {compile_seconds:.0f} s for {num_devices} × {device}".format(**answer)
    yield "microbatch: {microbatch_size} of {expected_batch_size} examples".format(**answer)
    needed, available = (answer[key] / ahead.GIB for key in ("memory_bytes", "device_memory_bytes"))
    misfit = "" if answer["fits"] else ": DOES NOT FIT"
    yield f"memory of a device: {needed:.2f} of {available:.0f} GiB{misfit}"
    for each in answer["collectives"]:
        yield f"exchanged in a step: {each['count']} {each['kind']} of {each['bytes']:,} bytes"
    yield f"arithmetic of a step: {answer['flop_per_step'] / 1e12:.4g} TFLOP"
