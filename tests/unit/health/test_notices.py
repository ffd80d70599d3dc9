"""Notices: facts that need an operator and are no fault of a GPU."""

import pytest

from gpu_plugin.health.notices import notices


def found(**known):
    given = {"mig_pending": None, "vgpu_licensed": None, "persistent": False} | known
    return [*notices("GPU-1", **given)]


@pytest.mark.parametrize("licensed", [None, True])
def test_a_gpu_without_a_pending_change_has_no_notice(licensed):
    assert found(vgpu_licensed=licensed) == []


@pytest.mark.parametrize(("pending", "now", "after", "back"), [(True, "off", "on", 0), (False, "on", "off", 1)])
def test_the_notice_of_a_pending_mode_needs_a_reset_and_has_the_command_to_undo_it(pending, now, after, back):
    [notice] = found(mig_pending=pending, persistent=True)
    assert f"is {now}" in notice.found
    assert f"be {after}" in notice.found
    assert (notice.resets, notice.persistent) == (True, True)
    assert notice.undo == f"nvidia-smi -i GPU-1 -mig {back}"


def test_a_vgpu_without_a_license_has_a_notice_of_its_own():
    assert len(found(mig_pending=True, vgpu_licensed=False)) == 2
    [notice] = found(vgpu_licensed=False)
    assert "license" in notice.found
    assert "nvidia-gridd" in notice.action
    assert not notice.resets
