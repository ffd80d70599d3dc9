"""The data of an option of `gpu-plugin run`: heading in help, flags, environment names, key in the config file, and parser."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from gpu_plugin.config import values
from gpu_plugin.config.values import Reading


class Option(msgspec.Struct, frozen=True):
    """One option.

    Attributes:
        name: the field of `Settings`.
        heading: its heading in help; empty for an option without a flag.
        flags: the flags without dashes. Messages show the first flag.
        envs: environment variables in the order of priority.
        file: the dotted key in the config file; empty for an option that is not in the file.
        default: the default before `parse`, or None.
        parse: reads a value.
        help: the help text.
    """

    name: str
    heading: str
    flags: tuple[str, ...]
    envs: tuple[str, ...]
    file: str
    default: object
    parse: Reading[object]
    help: str

    @property
    def switch(self) -> bool:
        """Whether the flag may be given without a value."""
        return self.parse in (values.boolean, values.boolean_or_auto)

    @property
    def many(self) -> bool:
        """Whether the flag may be repeated: its value is a list."""
        forms = cast("Sequence[Mapping[str, object]]", self.parse.schema.get("anyOf", ()))
        return any(form.get("type") == "array" for form in forms)


_declared: list[Option] = []


def option(
    heading: str,
    file: str,
    default: object,
    parse: Reading[object],
    text: str,
    *,
    flags: tuple[str, ...] = (),
    envs: tuple[str, ...] = (),
) -> Any:
    """Declare an option, and return its default for the field of `Settings`.

    The flag and the environment variable have the name of the field, unless others are given.
    """
    _declared.append(Option("", heading, flags, envs, file, default, parse, text))
    return None if default is None else parse(default)


def declared(fields: Iterable[str]) -> tuple[Option, ...]:
    """Return the declared options with their names. The first fields are the options' fields, in the same order."""
    return tuple(
        msgspec.structs.replace(
            each,
            name=name,
            flags=each.flags or ((name.replace("_", "-"),) if each.heading else ()),
            envs=each.envs or (name.upper(),),
        )
        for name, each in zip(fields, _declared, strict=False)
    )
