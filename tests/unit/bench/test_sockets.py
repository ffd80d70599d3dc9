"""The benchmark's count of pods across sockets, and the former rule that it compares with."""

from bench import sockets


def test_the_former_rule_takes_sockets_in_turn_where_all_pcie_relations_are_the_same():
    topology = sockets.flat(8)
    former, ours = sockets.links_alone(topology), sockets.ours(topology)
    for rule, sequence in ((former, [[0], [1], [0, 0, 0, 1]]), (ours, [[0], [0], [1, 1, 1, 1]])):
        free, got = set(range(8)), []
        for size in (1, 1, 4):
            chosen = rule(sorted(free), size)
            free.difference_update(chosen)
            got.append([topology.numa[gpu] for gpu in chosen])
        assert got == sequence


def test_both_rules_get_the_same_pods_and_ours_places_fewer_across_sockets():
    topology = sockets.flat(4)
    (pods, share), (same, before) = (
        sockets.across(topology, rule(topology)) for rule in (sockets.ours, sockets.links_alone)
    )
    assert pods == same > 1000
    assert share < 0.6 * before
