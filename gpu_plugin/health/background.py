"""What is remembered of a GPU beside the signals' own latches: what each of them is told of it."""

from gpu_plugin.health.latch import UNMARKED, AnyLatch, Latch, LatchKey, Marks, Memory, Recovery

NAME = "background"
"""Stands for a signal's name where it is written down; there is no signal of this name."""

KEY = LatchKey(NAME)


class Background(Memory, frozen=True):
    """`action` is what the driver said last that it asks for (`Sample.recovery_action`); None: nothing yet."""

    action: int | None = None

    @property
    def lasting(self) -> bool:
        """It always is: it is written down where there is something to it."""
        return True


def written(marks: Marks, action: int | None) -> AnyLatch | None:
    """What is known of a GPU as a latch that holds nothing against it, to be written down; None where nothing is."""
    return None if marks == UNMARKED and action is None else Latch(Background(action), recovery=Recovery(marks))


def read(latch: AnyLatch) -> tuple[Marks, int | None]:
    """The marks and the action of such a latch."""
    return latch.recovery.marks, latch.memory.action


def news(marks: Marks, action: int | None) -> tuple[object, ...]:
    """What of it is worth writing down when it changes: of energy, which counts up all the time, each doubling."""
    energy = None if marks.energy is None else marks.energy.bit_length()
    return marks.ecc, marks.binding, marks.counting, energy, action
