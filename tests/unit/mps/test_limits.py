import pytest

from gpu_plugin.mps.limits import differences, questions
from gpu_plugin.mps.plan import MpsDaemon

MEMORY = "set_default_device_pinned_mem_limit"
DAEMON = MpsDaemon(
    resource="nvidia.com/gpu",
    pipe="/pipe",
    log="/log",
    gpus=("GPU-a", "GPU-b"),
    replicas=4,
    commands=(f"{MEMORY} 0 20389M", f"{MEMORY} 1 500M", "set_default_active_thread_percentage 25"),
    threads=25.0,
)


def test_one_question_for_each_limit_the_threads_first():
    assert questions(DAEMON) == (
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 0",
        "get_default_device_pinned_mem_limit 1",
    )


@pytest.mark.parametrize(
    "answer", ["25.0 19G 500M", "25 19.9G 500M", "25.0 20389M 500M", '25.0 Unknown command "get_"']
)
def test_limits_of_the_configuration_as_daemons_round_them(answer):
    assert differences(DAEMON, answer) == ""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("100.0 19G 500M", "it gives each client 100.0 % of the threads, not 25 %"),
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
    assert differences(DAEMON, answer) == why
