"""The devices that pods may hold, by PodResources and the checkpoint, the order of the readings, and the kubelet."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_plugin.kubelet.holding import History, Holding, KubeletReadings, weigh
from tests.unit.kubelet.model_kubelet import ModelKubelet

GPU, OTHER_S = "nvidia.com/gpu", "example.com/gpu"
A, B = (GPU, "GPU-a"), (GPU, "GPU-b")
ONE, OTHER = (1, 1, 1), (1, 1, 2)
NONE: frozenset[tuple[str, str]] = frozenset()


def file(**pods):
    """A checkpoint: the devices of each pod by its uid."""
    found: dict[tuple[str, str], set[str]] = {}
    for uid, keys in pods.items():
        for key in keys:
            found.setdefault(key, set()).add(uid)
    return {key: frozenset(uids) for key, uids in found.items()}


def says(listed, written, kubelet=ONE, before="the same"):
    answer = None if listed is None else frozenset(listed)
    return KubeletReadings(kubelet, answer, written if before == "the same" else before, written)


HAS_A, HAS_B, HAS_BOTH, NOBODY = file(p={A}), file(p={B}), file(p={A, B}), file()


@pytest.mark.parametrize(
    ("said", "allocated"),
    [
        # One question: what each witness says alone, and together.
        pytest.param([says(None, None)], None, id="nobody says anything"),
        pytest.param([says(None, HAS_A)], {A}, id="the checkpoint alone"),
        pytest.param([says(None, NOBODY)], set(), id="a kubelet that gave nothing away"),
        pytest.param([says({A}, None)], {A, B}, id="without a checkpoint silence proves nothing"),
        pytest.param([says({A}, HAS_BOTH)], {A, B}, id="a plain init container's is not listed"),
        pytest.param([says({A}, NOBODY)], {A}, id="given out a moment ago"),
        # Then it is listed no more.
        pytest.param([says({A}, HAS_A), says((), HAS_A)], set(), id="its pod ended"),
        pytest.param(
            [says({A}, HAS_A), *[says((), HAS_A)] * 3], set(), id="its pod ended, however often that is asked"
        ),
        pytest.param([says({A}, HAS_BOTH), says((), HAS_BOTH)], set(), id="its pod ended, with its init container"),
        pytest.param([says({A}, file(p={A}, q={B})), says((), file(p={A}, q={B}))], {B}, id="another pod did not"),
        pytest.param([says({A, B}, HAS_BOTH), says({B}, HAS_BOTH)], {A, B}, id="a pod has all of its devices or none"),
        pytest.param([says({A}, None), says((), None)], {B}, id="its pod ended, as the same kubelet says"),
        # The answer of another kubelet, or of an unknown kubelet.
        pytest.param([says({A}, HAS_A), says((), HAS_A, OTHER)], {A}, id="a kubelet that has just started"),
        pytest.param([says({A}, HAS_A), says((), HAS_A, None)], {A}, id="a kubelet began meanwhile"),
        pytest.param([says({A}, HAS_A, None), says((), HAS_A)], {A}, id="a kubelet had begun meanwhile"),
        pytest.param([says({A}, HAS_A), says(None, HAS_A), says((), HAS_A)], {A}, id="it did not answer in between"),
        pytest.param([says({A}, None), says((), None, OTHER)], {A, B}, id="a new kubelet, and no checkpoint"),
        pytest.param([says({A}, HAS_A, None), says((), HAS_A, None)], {A}, id="which kubelet says so is never known"),
        # Its id was given to another pod.
        pytest.param([says({A}, HAS_A), says((), file(p={A}, q={A}))], {A}, id="of two pods one has ended"),
        pytest.param(
            [says({A}, HAS_A), says((), file(q={A}))], {A}, id="a plain init container of another pod has it now"
        ),
        pytest.param(
            [says({A}, HAS_A), says((), NOBODY), says((), file(p={A}))],
            {A},
            id="what the checkpoint lacked is forgotten",
        ),
        pytest.param(
            [says({A}, file(q={A}), before=HAS_A), says((), file(q={A}))],
            {A},
            id="it was given away during the question",
        ),
        pytest.param(
            [says({A}, file(q={A}), before=None), says((), file(q={A}))], {A}, id="whose it was before is not known"
        ),
    ],
)
def test_what_pods_may_hold(said, allocated):
    told = History()
    for each in said:
        holding, told = weigh(told, each, {A: 1.0, B: 1.0})
    assert holding.allocated == allocated


def test_what_was_listed_before_it_was_retired_proves_nothing_without_a_checkpoint():
    _, told = weigh(History(), says({A}, None), {A: 1.0})
    assert weigh(told, says((), None), {A: 1.0})[0].allocated == NONE
    assert weigh(told, says((), None), {A: 2.0})[0].allocated == frozenset({A})  # it was offered again in between
    _, told = weigh(History(), says({A}, None), {})
    assert weigh(told, says((), None), {A: 1.0})[0].allocated == frozenset({A})


def test_that_a_device_was_listed_proves_nothing_once_the_checkpoint_was_readable_again():
    """Its plugin may have given it to another pod's plain init container, which only the checkpoint lists."""
    _, told = weigh(History(), says({A}, None), {A: 1.0})
    holding, told = weigh(told, says((), file(q={A})), {A: 1.0})
    assert holding.allocated == frozenset({A})
    assert weigh(told, says((), None), {A: 1.0})[0].allocated == frozenset({A})


def test_without_a_checkpoint_an_answer_is_about_nothing_but_what_was_asked():
    assert weigh(History(), says({A}, None), {})[0].of_all is None
    assert weigh(History(), says(None, None), {})[0].of_all is None
    readable = KubeletReadings(ONE, frozenset({A}), HAS_A, HAS_A, writing=7)
    assert weigh(History(), readable, {})[0].of_all == frozenset({A})


def test_it_says_what_is_known_and_what_the_checkpoint_alone_keeps():
    both = weigh(History(), says({A}, HAS_BOTH), {})[0]
    assert both == Holding(frozenset({A, B}), frozenset({A}), frozenset({B}), answered=True)
    assert weigh(History(), says(None, HAS_A), {})[0] == Holding(frozenset({A}), NONE, frozenset({A}))


def test_two_pods_of_one_device_are_not_taken_for_each_other():
    shared = file(p={A}, q={A})
    _, told = weigh(History(), says({A}, shared), {})
    assert weigh(told, says((), shared), {})[0].allocated == frozenset({A})  # the answer may have been about either


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=200)
def test_what_a_pod_holds_is_never_taken_for_free(seed):
    dice = random.Random(seed)
    kubelet, told = ModelKubelet(healthy={GPU: frozenset("abc"), OTHER_S: frozenset("xy")}), History()
    retired: dict[tuple[str, str], float] = {}
    foreign: dict[tuple[str, str], float] = {}
    readable = True
    for step in range(60):
        offered = [key for key in kubelet.free if key not in retired] if kubelet.knows_pods else []
        match dice.choice(
            ["admit", "admit", "end", "restart", "ready", "list", "retire", "offer", "ask", "ask", "ask"]
        ):
            case "admit" if offered:
                app = dice.sample(offered, dice.randint(0, len(offered)))
                kubelet.admit(app, dice.sample(offered, dice.randint(0, 1)))
            case "end" if kubelet.pods:
                del kubelet.pods[dice.choice(sorted(kubelet.pods))]
            case "restart":
                kubelet.start()
            case "ready":
                kubelet.knows_pods = True
            case "list":
                kubelet.receive({GPU: "abc", OTHER_S: "xy"})
            case "retire" if ours := [key for key in offered if key[0] == GPU]:
                retired[dice.choice(ours)] = step
            case "offer" if retired:
                del retired[dice.choice(sorted(retired))]
            case "ask":
                before = kubelet.written() if dice.random() < 0.9 else None
                answer = kubelet.listed() if dice.random() < 0.9 else None
                process = kubelet.process
                if dice.random() < 0.1:
                    kubelet.start()
                readable = not readable or dice.random() < 0.8  # never unreadable twice in a row
                after = kubelet.written() if readable else None
                socket = (0, 0, process) if process == kubelet.process else None
                asked = {**foreign, **retired}
                holding, told = weigh(told, KubeletReadings(socket, answer, before, after), asked)
                # Without a checkpoint nothing else is ever asked about.
                concerned = kubelet.held if after is not None else kubelet.held & asked.keys()
                assert holding.allocated is None or concerned <= holding.allocated
                assert holding.listed <= kubelet.held
                if holding.allocated is not None:  # names of another plugin, which goes on giving those devices away
                    foreign = {key: foreign.get(key, step) for key in holding.allocated if key[0] == OTHER_S}


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=100)
def test_what_no_pod_holds_is_free_once_the_kubelet_knows_its_pods_and_has_written_its_file(seed):
    dice = random.Random(seed)
    kubelet, told = ModelKubelet(healthy={GPU: frozenset("abc")}), History()

    def ask():
        return weigh(
            told,
            KubeletReadings((0, 0, kubelet.process), kubelet.listed(), kubelet.written(), kubelet.written()),
            {(GPU, "a"): 0.0},
        )

    for _ in range(20):
        match dice.choice(["admit", "end", "restart", "ready", "ask"]):
            case "admit" if kubelet.knows_pods:
                free = kubelet.free
                kubelet.admit(dice.sample(free, dice.randint(0, min(2, len(free)))), [])
            case "end" if kubelet.pods:
                del kubelet.pods[dice.choice(sorted(kubelet.pods))]
            case "restart":
                kubelet.start()
            case "ready":
                kubelet.knows_pods = True
            case "ask":
                _, told = ask()
    kubelet.knows_pods = True
    kubelet.pods.clear()
    _, told = ask()  # it collects,
    kubelet.receive({GPU: "abc"})  # and writes
    assert ask()[0].allocated == NONE
