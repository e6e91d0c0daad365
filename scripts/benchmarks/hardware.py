"""Compiles a config's step for an absent TPU or GPU, and prints whether it fits.

python -m scripts.benchmarks.hardware --config=cifar10_medium:bam_sam --target=v5e:2x2

TARGET is v5e, v5p or v6e with a topology, or h100, h200 or b200 with or without a number of
devices, as h100:8. The script needs the vendor's compiler (the extra `tpu` or `cuda`), but not the
device. It compiles the run's real step for the real number of devices. Images are blank, so the
public data sets need not be on this machine. It runs nothing and estimates no time.
"""

from collections.abc import Iterator
from pathlib import Path

from absl import flags

from bam import files, waits
from bam.cli import command, screen
from bam.files import JsonMapping
from scripts.benchmarks import ahead

flags.DEFINE_string("config", None, "NAME:METHOD of a shipped config, or FILE.py:METHOD")
_TARGET = flags.DEFINE_string(
    "target", "", "for example v5e:1x1, v5e:16x16, v6e:2x2, v5p:2x2x1, h100, h100:8, h200, b200"
)
_OUT = flags.DEFINE_string("out", "", "JSON file for the answer; '': none")
_SIZE = flags.DEFINE_integer("size", 0, "side of streamed images in pixels; 0: the data's", 0)


def main() -> None:
    """Compiles the step, prints the answer, and writes it to --out.

    If JAX has not started in this process, it stays on CPU from now on.
    """
    files.check_writable(_OUT.value)
    hardware = ahead.devices_of(_TARGET.value)
    with waits.awaited(screen.show, f"compiling for {_TARGET.value}", stays=False):
        answer = ahead.look(flags.FLAGS.config, _TARGET.value, hardware, _SIZE.value)
    screen.say(*lines(answer))
    if _OUT.value:
        files.write_json(Path(_OUT.value), answer)


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
    for each in answer["convolutions"]:
        yield "convolutions: {count} {kind} of {groups} groups, window {window}".format(**each)
    yield f"arithmetic of a step: {answer['flop_per_step'] / 1e12:.4g} TFLOP"


if __name__ == "__main__":
    command.run_script(main, ["config", "target"])
