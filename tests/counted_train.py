"""`bam train`, noting each step that it computes in the file STEPS_LOG, apart from any ledger.

KILL_SAVING=2 ends it by SIGKILL while it saves its second checkpoint.
"""

import itertools
import os
import signal
import sys
import threading

from bam.audit.audited import with_step
from bam.cli import main
from bam.privacy import checkpoint
from bam.training import loop

build, write, saves = loop.build, checkpoint.write, itertools.count(1)


def build_counted(*arguments, **options):
    experiment = build(*arguments, **options)

    def step(*arguments):
        with open(os.environ["STEPS_LOG"], "a") as log:
            log.write("step\n")
        return experiment.step(*arguments)

    return with_step(experiment, step)


def write_or_die(*arguments):
    if next(saves) == int(os.environ.get("KILL_SAVING", 0)):
        threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
    write(*arguments)


if __name__ == "__main__":
    loop.build, checkpoint.write = build_counted, write_or_die
    sys.argv.insert(1, "train")
    main.main()
