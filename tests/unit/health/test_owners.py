import pytest

from gpu_plugin.health.signals.application_errors import owner


@pytest.mark.parametrize(
    ("pod", "made_by"),
    [
        ("ml/web-7d4b9c6f5d-x7k2p", "ml/web"),  # Deployment
        ("ml/web-7d4b9c6f5d-b4dfz", "ml/web"),
        ("ml/train-x7k2p", "ml/train"),  # Job, ReplicaSet, DaemonSet
        ("ml/train-12-x7k2p", "ml/train"),  # Indexed Job
        ("ml/nightly-29384756-x7k2p", "ml/nightly"),  # CronJob
        ("ml/set-workers-0-3-x7k2p", "ml/set-workers"),  # JobSet
        ("ml/db-0", "ml/db"),  # StatefulSet
        ("ml/db-17", "ml/db"),
        ("ml/llama-3-8b-0", "ml/llama-3-8b"),
        ("ml/notebook", "ml/notebook"),
        ("ml/gpu-burner", "ml/gpu-burner"),  # vowels are in no generated name
        ("ml/x7k2p", "ml/x7k2p"),
        ("other/train-x7k2p", "other/train"),
        ("", ""),
    ],
)
def test_whose_a_pod_is(pod, made_by):
    assert owner(pod) == made_by


def test_a_long_name_takes_no_time():
    assert owner("a/" + "0-" * 2_000 + "!") == "a/" + "0-" * 2_000 + "!"
