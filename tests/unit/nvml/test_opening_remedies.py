from gpu_plugin.devices.nvml_h import Return
from gpu_plugin.nvml.opening_remedies import IN_THE_LOG, opening_remedy


def test_each_way_in_which_the_driver_does_not_open_has_its_own_remedy():
    known = (Return.LIBRARY_NOT_FOUND, Return.DRIVER_NOT_LOADED, Return.LIB_RM_VERSION_MISMATCH, Return.NO_PERMISSION)
    remedies = [opening_remedy(code) for code in (*known, Return.UNKNOWN)]
    assert len(set(remedies)) == len(remedies)
    assert "modprobe nvidia" in opening_remedy(int(Return.DRIVER_NOT_LOADED))
    assert opening_remedy(12345) == IN_THE_LOG
