"""How simulated GPUs can be partitioned into MIG devices: the profiles of each model, their placement and their names.

Pure: the node stores the result. Sources are NVIDIA's MIG user guide (profiles, placements, mig-minors) and the output of
nvidia-smi about GPU instances.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter

import msgspec
from msgspec.structs import replace

from gpu_plugin.config.errors import ConfigError
from gpu_plugin.devices.node import Engines

# Numbers of slices of a GPU, the same for all models here
COMPUTE_SLICES = 7
MEMORY_SLICES = 8

MEDIA = "+me"  # The suffix of the profile with the media engines, of which a GPU has one set

_MEMORY: Mapping[str, tuple[tuple[int, int], ...]] = {
    # For 1, 2, 4 and 8 memory slices: gigabytes in the profile's name, and MiB of `nvidia-smi mig -lgip`. The MiB of the H200
    # (except the first) and of the B200 are not recorded: these values result in the names by NVIDIA's own rule.
    "a100-40gb": ((5, 4864), (10, 9856), (20, 19968), (40, 40192)),
    "a100-80gb": ((10, 9728), (20, 19968), (40, 40192), (80, 80640)),
    "h100-80gb": ((10, 9984), (20, 20096), (40, 40448), (80, 81152)),
    "h200-141gb": ((18, 16384), (35, 33280), (71, 67072), (141, 134656)),
    "b200-180gb": ((23, 22144), (45, 44800), (90, 90112), (180, 180736)),
}

# SM and DEC of `nvidia-smi mig -lgip` for 1g, 1g with double memory, 2g, 3g, 4g and 7g. Values of the H200 and B200 are not
# recorded, so values of an H100 are used, which has as many JPEG engines as decoders. The number of copy engines (CE) is the
# number of g, but 8 for 7g of an H100. The optical flow engine (OFA) belongs to the whole GPU, or to the media engines.
_MULTIPROCESSORS = {"a100": (14, 14, 28, 42, 56, 98), "h100": (16, 26, 32, 60, 64, 132)}
_DECODERS = {"a100": (0, 1, 1, 2, 2, 5), "h100": (1, 1, 2, 3, 4, 7)}

# Possible compute slices of a compute instance, by the compute slices of its GPU instance.
_COMPUTE_INSTANCES = {1: (1,), 2: (1, 2), 3: (1, 2, 3), 4: (1, 2, 4), 7: (1, 2, 3, 4, 7)}

# GPU instance ids by memory slices, in the order in which they are assigned. A GPU has 15 ids in all.
_INSTANCE_IDS = {8: (0,), 4: (1, 2), 2: (3, 4, 5, 6), 1: (7, 8, 9, 10, 11, 12, 13)}

_INSTANCES_PER_GPU = 15
_NAME = re.compile(r"(?:([0-9]+)c\.)?([0-9]+)g\.([0-9]+)gb([+-][a-z.]+)?")


class GpuInstanceProfile(msgspec.Struct, frozen=True):
    """A size of GPU instance, of which a GPU can have `most`.

    If there are enough slices and instances of each size do not exceed `most`, the driver's placements suffice too.
    """

    name: str
    compute: int
    memory: int
    memory_mb: int
    most: int
    engines: Engines


class MigInstance(msgspec.Struct, frozen=True):
    """A compute instance of a simulated GPU with its GPU instance, as NVML reports them."""

    profile: str
    gpu_instance: int
    compute_instance: int
    gpu_instance_slices: int
    compute_slices: int
    memory_mb: int
    engines: Engines


@cache
def gpu_instance_profiles(model: str) -> Mapping[str, GpuInstanceProfile]:
    """Return the profiles of a model in `_MEMORY` by name, the smallest first."""
    (one, one_mb), (two, two_mb), (four, four_mb), (eight, eight_mb) = _MEMORY[model]
    return {
        profile.name: profile
        for profile in (
            GpuInstanceProfile(f"1g.{one}gb", 1, 1, one_mb, 7, _engines(model, 0, 1)),
            GpuInstanceProfile(f"1g.{one}gb{MEDIA}", 1, 1, one_mb, 1, _engines(model, 0, 1, media=True)),
            GpuInstanceProfile(f"1g.{two}gb", 1, 2, two_mb, 4, _engines(model, 1, 1)),
            GpuInstanceProfile(f"2g.{two}gb", 2, 2, two_mb, 3, _engines(model, 2, 2)),
            GpuInstanceProfile(f"3g.{four}gb", 3, 4, four_mb, 2, _engines(model, 3, 3)),
            GpuInstanceProfile(f"4g.{four}gb", 4, 4, four_mb, 1, _engines(model, 4, 4)),
            GpuInstanceProfile(f"7g.{eight}gb", 7, 8, eight_mb, 1, _engines(model, 5, 7, media=True)),
        )
    }


def _engines(model: str, row: int, compute: int, *, media: bool = False) -> Engines:
    """Return the engines of a GPU instance with `compute` compute slices; `row` is the index in the tables above."""
    older = model.startswith("a100")
    of = "a100" if older else "h100"
    decoders = max(_DECODERS[of][row], int(media))
    jpeg = int(media) if older else decoders
    copy = 8 if compute == COMPUTE_SLICES and not older else compute
    return Engines(_MULTIPROCESSORS[of][row], copy, decoders, 0, jpeg, int(media))


def lay_out(model: str, profiles: Sequence[str]) -> tuple[MigInstance, ...]:
    """Return the MIG devices of a GPU with these profiles, by MIG index: by GPU instance, then compute instance.

    A profile such as 1c.3g.20gb is a compute instance in the last GPU instance of 3g.20gb with enough room, or in a new GPU
    instance.

    Raises:
        ConfigError: there is no such profile, or not enough room on the GPU.
    """
    instances: list[tuple[GpuInstanceProfile, list[int]]] = []
    for name in profiles:
        profile, compute = _find(model, name)
        with_room = [parts for of, parts in instances if of is profile and sum(parts) + compute <= of.compute]
        if with_room:
            with_room[-1].append(compute)
        else:
            instances.append((profile, [compute]))
    _check_room([profile for profile, _ in instances])
    ids = {size: iter(numbers) for size, numbers in _INSTANCE_IDS.items()}
    found = [
        MigInstance(
            profile=profile.name if compute == profile.compute else f"{compute}c.{profile.name}",
            gpu_instance=number,
            compute_instance=at,
            gpu_instance_slices=profile.compute,
            compute_slices=compute,
            memory_mb=profile.memory_mb,
            engines=replace(
                profile.engines, multiprocessors=profile.engines.multiprocessors * compute // profile.compute
            ),
        )
        for (profile, parts), number in ((i, next(ids[i[0].memory])) for i in instances)
        for at, compute in enumerate(parts)
    ]
    return tuple(sorted(found, key=attrgetter("gpu_instance", "compute_instance")))


def minors(gpu_minor: int) -> dict[str, int]:
    """Return the content of mig-minors for one GPU: all possible instances."""
    listed = {}
    for number in range(_INSTANCES_PER_GPU):
        minor = _minor(gpu_minor, number)
        listed[f"gpu{gpu_minor}/gi{number}/access"] = minor
        for part in range(8):
            listed[f"gpu{gpu_minor}/gi{number}/ci{part}/access"] = minor + 1 + part
    return listed


def capability_nodes(gpu_minor: int, instances: Iterable[MigInstance]) -> frozenset[str]:
    """Return the device nodes of these instances of one GPU."""
    numbers = set()
    for instance in instances:
        minor = _minor(gpu_minor, instance.gpu_instance)
        numbers |= {minor, minor + 1 + instance.compute_instance}
    return frozenset(f"/dev/nvidia-caps/nvidia-cap{number}" for number in numbers)


def _minor(gpu_minor: int, gpu_instance: int) -> int:
    """Return the minor of a GPU instance. The minors of its eight parts follow. Minor 1 is mig/config and 2 is mig/monitor."""
    return 3 + 9 * (_INSTANCES_PER_GPU * gpu_minor + gpu_instance)


def _find(model: str, name: str) -> tuple[GpuInstanceProfile, int]:
    """Return the GPU instance profile of a name, and the number of compute slices that it uses of it."""
    known = gpu_instance_profiles(model)
    form = _NAME.fullmatch(name)
    profile = known.get(name[name.find(".") + 1 :] if form and form[1] else name)
    if form is None or profile is None:
        part = next(each.name for each in known.values() if each.compute == 3)
        raise ConfigError(f"{name}: no such MIG profile; there are {', '.join(known)}, and parts such as 1c.{part}")
    compute = int(form[1] or profile.compute)
    if form[1] and (compute == profile.compute or compute not in _COMPUTE_INSTANCES[profile.compute]):
        sizes = ", ".join(f"{size}c" for size in _COMPUTE_INSTANCES[profile.compute] if size < profile.compute)
        raise ConfigError(f"{name}: {profile.name} {f'has parts of {sizes}' if sizes else 'has no parts'}")
    return profile, compute


def _check_room(profiles: Sequence[GpuInstanceProfile]) -> None:
    for profile in profiles:
        if profiles.count(profile) > profile.most:
            raise ConfigError(f"{profile.name}: {profiles.count(profile)} of them: a GPU has room for {profile.most}")
    compute, memory = sum(p.compute for p in profiles), sum(p.memory for p in profiles)
    if compute > COMPUTE_SLICES or memory > MEMORY_SLICES:
        raise ConfigError(
            f"{', '.join(p.name for p in profiles)}: {compute} compute slices and {memory} memory slices: "
            f"a GPU has {COMPUTE_SLICES} and {MEMORY_SLICES}"
        )
