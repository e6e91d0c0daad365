"""Compiles a config's step for a TPU or GPU that is not there, and says what the compiler thinks.

bam hardware --config=configs/cifar10.py:bam_sam --target=v5e:2x2 [--json=FILE]

TARGET is v5e, v5p or v6e with a topology, or h100, h200 or b200 alone or with a number of devices,
as h100:8. It needs the vendor's compiler, not the device: the extra `tpu` or `cuda`. The step is
the real one, for the real number of devices; images are blank, so no data is needed for the public
data sets. Nothing is run: times, of TPUs alone, are ESTIMATES by the compiler's count of cycles.
"""

from collections.abc import Iterator
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from bam import files
from bam.cli import ahead, console
from bam.files import JsonMapping

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py:METHOD")
_TARGET = flags.DEFINE_string("target", "", f"for example {ahead.EXAMPLES}")
_JSON = flags.DEFINE_string("json", "", "file to write the answer to as well; '': none")
_SIZE = flags.DEFINE_integer("size", 0, "of a side of images that are streamed; 0: the data's", 0)
console.require("config", "target")


def main() -> None:
    """Compiles, prints, and writes the answer."""
    with console.one_line_errors():
        console.check_writable(_JSON.value)
        hardware = ahead.devices_of(_TARGET.value)
        answer = ahead.look(_CONFIG.value, _TARGET.value, hardware, _SIZE.value)
        console.say(*lines(answer))
        if _JSON.value:
            files.write_json(Path(_JSON.value), answer)


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
        yield f"exchanged in a step: {each['count']:g} {each['kind']} of {each['bytes']:,} bytes"
    yield f"arithmetic of a step: {answer['flop_per_step'] / 1e12:.4g} TFLOP"
    for scope in answer["loops_counted_once"]:
        yield f"COUNTED TOO LITTLE: a loop of unknown turns, taken as one: {scope}"
    if "estimated_cycles_per_step" in answer:
        yield (
            "ESTIMATE by the compiler: {estimated_cycles_per_step:.4g} cycles a step, which are "
            "{estimated_seconds_per_step:.3g} s and {estimated_share_of_peak:.0%} of bfloat16's "
            "peak; {estimated_hours_per_run:.3g} h for {num_steps:,} steps"
        ).format(**answer)
    else:
        yield "no time: this compiler estimates none"


if __name__ == "__main__":
    console.run(main)
