"""What an option of `gpu-plugin run` is: its heading in help, flags, environment names, place in the config file and reading."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from gpu_plugin.config import values
from gpu_plugin.config.values import Reading


class Option(msgspec.Struct, frozen=True):
    """One option.

    `name` is the field of Settings; `heading` the one of help, empty for what has no flag; `flags` without dashes, the first is
    the one we show; `envs` in the order they are looked up; `file` the dotted key in the config file; `default` is read by
    `parse` unless it is None.
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
        """Whether the flag may stand without a value."""
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
    """Declares an option and gives its default, for the field of `Settings` that has its name.

    Flag and environment variable are that name, unless others are given.
    """
    _declared.append(Option("", heading, flags, envs, file, default, parse, text))
    return None if default is None else parse(default)


def declared(fields: Iterable[str]) -> tuple[Option, ...]:
    """The options, by the names of the fields that they were declared for: these stand first, in the same order."""
    return tuple(
        msgspec.structs.replace(
            each,
            name=name,
            flags=each.flags or ((name.replace("_", "-"),) if each.heading else ()),
            envs=each.envs or (name.upper(),),
        )
        for name, each in zip(fields, _declared, strict=False)
    )
