"""Compiles a config's step for a TPU or GPU that is not there, and says what the compiler thinks.

bam hardware --config=configs/cifar10.py:bam_sam --target=v5e:2x2 [--json=FILE]

TARGET is v4, v5e, v5p or v6e with a topology, or a100, h100, h200 or b200 alone or with a number of
devices, as h100:8. It needs the vendor's compiler, not the device: the extra `tpu` or `cuda`. The
step is the real one, for the real number of devices; images are blank, so no data is needed for
the public data sets. Times, of TPUs alone, are ESTIMATES by the compiler's own model of cycles.
Nothing is run.
"""

from pathlib import Path

from absl import flags
from ml_collections import config_flags

from bam import files
from bam.cli import ahead, console
from bam.files import JsonMapping

_CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py:METHOD")
_TARGET = flags.DEFINE_string("target", "", f"for example {ahead.EXAMPLES}")
_JSON = flags.DEFINE_string("json", "", "file to write the answer to as well; '': none")
_PROGRAM = flags.DEFINE_string("program", "", "file for the compiled program's text; '': none")
_SIZE = flags.DEFINE_integer(
    "size",
    0,
    "pixels of a side of images that are streamed, in place of the data set's; 0: those",
    0,
)
console.require("config", "target")


def main() -> None:
    """Compiles, prints, and writes the answer."""
    with console.one_line_errors():
        for file in (_JSON.value, _PROGRAM.value):
            console.check_writable(file)
        hardware = ahead.devices_of(_TARGET.value)
        answer, text = ahead.look(_CONFIG.value, _TARGET.value, hardware, _SIZE.value)
        for name, value in rows(answer):
            print(f"{name:<24}{value}")
        if _JSON.value:
            files.write_json(Path(_JSON.value), answer)
        if _PROGRAM.value:
            files.write_text(Path(_PROGRAM.value), text)


def rows(answer: JsonMapping) -> list[list[str]]:
    """The answer as a person reads it, a line for each fact."""
    gib = 2**30
    shown = [
        ["compiled", f"in {answer['compile_seconds']:.0f} s for {answer['num_devices']} × "
         f"{answer['device']}" if answer["compiles"] else f"NO: {answer['problem']}"],
        ["microbatch", f"{answer['microbatch_size']} of {answer['expected_batch_size']} examples"],
    ]  # fmt: skip
    if not answer["compiles"]:
        return shown
    needed, available = answer["memory_bytes"] / gib, answer["device_memory_bytes"] / gib
    sums = [
        f"{c['count']:g} {c['kind']} of {c['bytes'] / 1e6:.3g} MB" for c in answer["collectives"]
    ]
    shown += [
        ["memory of a device", f"{needed:.2f} of {available:.0f} GiB (arguments "
         f"{answer['argument_bytes'] / gib:.2f}, temporary {answer['temporary_bytes'] / gib:.2f})"
         + ("" if answer["fits"] else ": DOES NOT FIT")],
        ["collectives of a step", ", ".join(sums) or "none"],
        ["arithmetic of a step", f"{answer['flop_per_step'] / 1e12:.4g} TFLOP"],
    ]  # fmt: skip
    if "estimated_cycles_per_step" not in answer:
        return [*shown, ["a step", "no time: this compiler estimates none"]]
    shown += [
        ["COUNTED TOO LITTLE", f"a loop of unknown turns, taken as one: {scope}"]
        for scope in answer["loops_counted_once"]
    ]
    seconds, hours = answer["estimated_seconds_per_step"], answer["estimated_hours_per_run"]
    return [
        *shown,
        ["ESTIMATE", f"{answer['estimated_cycles_per_step']:.4g} cycles a step, by the compiler"],
        ["a step", f"{seconds:.3g} s, {answer['estimated_share_of_peak']:.0%} of bfloat16's peak"],
        ["the run", f"{hours:.3g} h for {answer['num_steps']:,} steps: "
         f"{answer['estimated_device_hours_per_run']:.3g} device-hours"],
    ]  # fmt: skip


if __name__ == "__main__":
    console.run(main)
