"""The requests for which the benchmark measures GetPreferredAllocation, and the accepted answers."""

import random

import pytest

from bench import placement
from bench.plan import MeasurementError
from bench.probed import probed
from gpu_plugin.kubelet import wire


@pytest.fixture(scope="module")
def asked():
    return placement.questions(probed("dgx1-v100"), random.Random(3))


def test_there_are_requests_of_every_size(asked):
    assert list(asked) == [(which, size) for which in (placement.ALL, placement.SOME) for size in range(1, 9)]
    for (which, size), questions in asked.items():
        for question in questions:
            [request] = wire.decode_preferred(question.request)
            available, required = request.available_device_ids, request.must_include_device_ids
            assert request.allocation_size == len(question.best) == size
            assert set(required) <= set(question.best) <= set(available)
            assert which == placement.SOME or (len(available) == 8 and not required)
        assert len({question.request for question in questions}) > 1
    halves = [question for question in asked[placement.SOME, 4] if len(question.available) < 8 and question.required]
    assert halves, "some availability is partial with something required"


def test_only_the_best_answer_is_one(asked):
    question = asked[placement.ALL, 4][0]
    question.check(wire.encode_preferred([question.best]))
    others = [identifier for identifier in question.available if identifier not in question.best]
    for wrong in ((), (*question.best[:3], others[0]), question.best[:3], (*question.best, others[0])):
        with pytest.raises(MeasurementError, match="not the expected answer"):
            question.check(wire.encode_preferred([wrong]))
