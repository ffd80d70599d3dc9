"""What the driver asks for so that a GPU works again (NVML field 230), as far as every signal must know it."""

from gpu_plugin.devices.nvml_h import RecoveryAction

_HARMLESS = frozenset({RecoveryAction.NONE, RecoveryAction.RECOVER_IMEX_DOMAIN})


def fatal_action(action: int | None) -> bool:
    """Whether a GPU of which the driver asks for this is not fit for use; None: it does not say.

    An action that nvml.h does not name yet is taken for the worst. An IMEX domain to be recovered is not: sharing memory
    between nodes is what suffers, the GPU itself works.
    """
    return action is not None and action not in _HARMLESS
