"""The time since which the kubelet has a resource, or has lost it."""

from gpu_plugin.kubelet.registrations import Registrations


def test_a_resource_is_lost_since_its_registration_ended_whatever_fails_after_that():
    now = [1.0]
    registrations = Registrations(clock=lambda: now[0])
    registrations.away("gpu", "no kubelet")
    assert registrations.of("gpu").lost is None, "it was never registered"
    registrations.taken("gpu")
    for now[0], why in ((5.0, "the kubelet dropped the stream"), (9.0, "the kubelet refused")):
        registrations.away("gpu", why)
        assert (registrations.of("gpu").lost, registrations.of("gpu").why) == (5.0, why)
    registrations.taken("gpu")
    assert registrations.of("gpu").lost is None
