"""The compiled functions of a run's parts, which are checked against the memory before they run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

from jaxtyping import PyTree

from bam import memory
from bam.core.program import compile_once
from bam.core.tracing import is_tracing
from bam.errors import InputError
from bam.training import devices
from bam.training.step import Parts

Output = TypeVar("Output")
SPARE = 0.9  # share of the free memory that an advised microbatch size may take


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Compiles functions whose first argument is the parts.

    Parts of equal structure share a program.

    Attributes:
      parts: the parts.
      log: called with a line on long waits.
      fitting: functions that fit the memory -> their number of rows at once.
    """

    parts: Parts
    log: Callable[[str], None]
    fitting: dict[Callable[..., object], int] = dataclasses.field(default_factory=dict)

    def bind(
        self, function: Callable[..., Output], what: str, *, donate: tuple[int, ...] = ()
    ) -> Callable[..., Output]:
        """Returns the function without the parts, compiled on its first call.

        That call is an InputError if the program does not fit the memory; it names a
        `microbatch_size` that does.

        Args:
          function: the function; its first argument is the parts.
          what: what it computes, for a message.
          donate: the arguments, counted without the parts, whose memory the result may take.
        """
        program = compile_once(function, self.parts, donate=donate)

        @functools.wraps(program)
        def call(*args: PyTree) -> Output:
            # What is traced runs elsewhere, perhaps on devices that are not there.
            if function not in self.fitting and not is_tracing():
                self.check(function, what, *args, donate=donate)
            result: Output = program(*args)
            return result

        return call

    def check(
        self,
        function: Callable[..., object],
        what: str,
        *args: PyTree,
        donate: tuple[int, ...] = (),
        keeps_size: bool = False,
    ) -> None:
        """Raises `memory.TooLargeError` if a function of `Parts` does not fit the memory.

        The error names a `microbatch_size` that fits.
        The arguments are those of `bind`, and those of the function without the parts.
        `keeps_size`: the run goes on, so its size cannot be changed, none is looked for, and the
        error is an InputError.
        """

        def needs(size: int) -> memory.Needs | None:
            parts = self.parts.with_microbatch_size(size)
            return devices.needs(compile_once(function, parts, donate=donate), *args)

        size = self.parts.gradient.microbatch_size
        needed = needs(size)
        if needed is None or needed.fits:
            self.fitting[function] = size
            return
        problem = f"{what} with microbatch_size={size} {needed}"
        if keeps_size:
            raise InputError(
                f"{problem}: free some, because a run that goes on keeps its microbatch_size"
            )
        self.log(f"{problem}: looking for a size that fits …")

        def num_bytes_of(size: int) -> int:
            smaller = needs(size)
            return smaller.num_bytes if smaller else 0

        # What is free varies, and the size should still fit when it is tried.
        most = int(SPARE * needed.free)
        fitting, least = memory.largest_size(num_bytes_of, size, needed.num_bytes, most)
        fitting = fitting or int(least <= needed.free)
        if fitting:
            raise memory.TooLargeError(
                f"{problem}: --config.microbatch_size={fitting} fits", fitting
            )
        one = memory.in_words(needed.num_sharing * least)
        raise memory.TooLargeError(f"{problem}, and a single example takes {one}: {memory.SMALLER}")
