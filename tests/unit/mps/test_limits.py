import pytest

from gpu_plugin.config.sharing import MpsLimits
from gpu_plugin.devices.node import Gpu
from gpu_plugin.mps.limits import DaemonLimits, limits_of

MIB = 1024 * 1024
LIMITS = DaemonLimits(25.0, ((0, 20389), (1, 500)))
SET_MEMORY, SET_THREADS = "set_default_device_pinned_mem_limit", "set_default_active_thread_percentage"


def gpus(*memory):
    return tuple(Gpu(f"GPU-{index}", index, memory_bytes=each) for index, each in enumerate(memory, 3))


@pytest.mark.parametrize(
    ("memory", "replicas", "configured", "commands"),
    [
        # equal shares, rounded down; GPUs are counted as the daemon counts them
        (
            (1000 * MIB + 1, 40 * 1024 * MIB),
            3,
            MpsLimits(),
            (f"{SET_MEMORY} 0 333M", f"{SET_MEMORY} 1 13653M", f"{SET_THREADS} 33"),
        ),
        # limits of the configuration
        (
            (80 * 1024 * MIB,),
            4,
            MpsLimits(active_thread_percentage=62.5, pinned_memory=6000),
            (f"{SET_MEMORY} 0 6000M", f"{SET_THREADS} 62.5"),
        ),
        ((None,), 4, MpsLimits(active_thread_percentage=100.0), (f"{SET_THREADS} 100",)),
        # a GPU that does not report its memory has no equal share
        ((None,), 2, MpsLimits(), (f"{SET_THREADS} 50",)),
        ((None,), 2, MpsLimits(pinned_memory=9), (f"{SET_MEMORY} 0 9M", f"{SET_THREADS} 50")),
    ],
)
def test_commands_set_equal_shares_or_the_limits_of_the_configuration(memory, replicas, configured, commands):
    assert limits_of(gpus(*memory), replicas, configured).commands == commands


def test_one_question_for_each_limit_the_threads_first():
    assert LIMITS.questions == (
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 0",
        "get_default_device_pinned_mem_limit 1",
    )


@pytest.mark.parametrize(
    ("threads", "answer"),
    [
        (25, "25.0 19G 500M"),
        (25, "25 19.9G 500M"),
        (25, "25.0 20389M 500M"),
        (25, '25.0 Unknown command "get_"'),
        (12.34, "12.3 19G 500M"),
        (33.25, "33.3 19G 500M"),
    ],
)
def test_limits_of_the_configuration_as_daemons_round_them(threads, answer):
    assert DaemonLimits(threads, LIMITS.memory).differences(answer) == ""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("100.0 19G 500M", "it gives each client 100.0 % of the threads, not 25 %"),
        ("25.1 19G 500M", "it gives each client 25.1 % of the threads, not 25 %"),
        ("", "it gives each client 'nothing' of the threads, not 25 %"),
        ("25.0 21G 500M", "it limits the memory of device 0 to 21G, not 20389M"),
        ("25.0 18G 500M", "it limits the memory of device 0 to 18G, not 20389M"),
        ("25.0 17179869183G 500M", "it limits the memory of device 0 to 17179869183G, not 20389M"),
        ("25.0 19G 501M", "it limits the memory of device 1 to 501M, not 500M"),
        ("25.0 19G nonsense", "it limits the memory of device 1 to nonsense, not 500M"),
        ("25.0 19G", "it has not set or kept all of 2 memory limits: it answers '19G'"),
        ("25.0", "it has not set or kept all of 2 memory limits: it answers 'nothing'"),
    ],
)
def test_other_limits(answer, why):
    assert LIMITS.differences(answer) == why
