"""Notices: facts that need an operator and are no fault of a GPU."""

import pytest

from gpu_plugin.health.notices import notices


def told(**known):
    given = {"mig_pending": None, "vgpu_licensed": None, "persistent": False} | known
    return [(notice.found, notice.remedy) for notice in notices("GPU-1", **given)]


@pytest.mark.parametrize("licensed", [None, True])
def test_a_gpu_without_a_pending_change_has_no_notice(licensed):
    assert told(vgpu_licensed=licensed) == []


@pytest.mark.parametrize(("pending", "now", "after", "back"), [(True, "off", "on", 0), (False, "on", "off", 1)])
def test_the_notice_of_a_pending_mode_has_the_commands_to_apply_and_to_undo_it(pending, now, after, back):
    [(found, remedy)] = told(mig_pending=pending)
    assert f"is {now}" in found
    assert f"be {after}" in found
    assert "gpu-plugin release --gpu GPU-1 && nvidia-smi --gpu-reset -i GPU-1 && gpu-plugin resume" in remedy
    assert f"-mig {back}" in remedy


def test_the_commands_of_the_reset_fit_the_gpu():
    [(_, remedy)] = told(mig_pending=True, persistent=True)
    assert "-pm 0 && nvidia-smi --gpu-reset -i GPU-1 && nvidia-smi -i GPU-1 -pm 1" in remedy
    [(_, remedy)] = told(mig_pending=True, released=True)
    assert "gpu-plugin release" not in remedy


def test_a_vgpu_without_a_license_has_a_notice_of_its_own():
    assert len(told(mig_pending=True, vgpu_licensed=False)) == 2
    [(found, remedy)] = told(vgpu_licensed=False)
    assert "license" in found
    assert "nvidia-gridd" in remedy
