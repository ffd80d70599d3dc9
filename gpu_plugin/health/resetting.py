"""The commands that reset a GPU. Pure."""


def reset_commands(gpu: str, *, released: bool, persistent: bool) -> str:
    """Return the shell commands that reset a GPU, without the release if it is already `released`.

    `persistent` is whether the last look found persistence mode, in which the driver refuses a reset.
    """
    reset = [f"nvidia-smi --gpu-reset -i {gpu}"]
    if persistent:
        reset = [f"nvidia-smi -i {gpu} -pm 0", *reset, f"nvidia-smi -i {gpu} -pm 1"]
    commands = [*reset, f"gpu-plugin resume --gpu {gpu}"]
    return " && ".join(commands if released else [f"gpu-plugin release --gpu {gpu}", *commands])
