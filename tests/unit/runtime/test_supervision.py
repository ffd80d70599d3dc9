"""A part of the process that fails or ends is begun again."""

import asyncio

import anyio

from gpu_plugin.runtime.supervision import LONGEST_RETRY, forever
from tests.unit.daemon.skipping_loop import SkippingLoop


def test_a_part_is_begun_again_ever_more_slowly_and_soon_after_it_has_run_for_long(caplog):
    lives = [0.0] * 7 + [LONGEST_RETRY - 1, LONGEST_RETRY, 0.0]
    pauses = []

    async def supervised():
        ended = anyio.current_time()

        async def live():
            nonlocal ended
            pauses.append(anyio.current_time() - ended)
            if len(pauses) > len(lives):
                scope.cancel()
                await anyio.sleep_forever()
            await anyio.sleep(lives[len(pauses) - 1])
            ended = anyio.current_time()
            if len(pauses) % 2:
                raise RuntimeError("of no importance")

        with anyio.CancelScope() as scope:
            await forever("the part", live)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(supervised())
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30, 30, 1, 2]
    assert caplog.text.count("the part failed; restarting it") == 5
    assert caplog.text.count("the part ended, which it should not; restarting it") == 5
