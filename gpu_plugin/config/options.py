"""The data of an option of `gpu-plugin run`: heading in help, flags, environment names, key in the config file, and parser."""

from typing import Any, get_args

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
        file: the dotted key in the config file; empty for an option without a key.
        default: the default as text or as true or false; None without a default.
        parse: reads a value.
        help: the help text.
    """

    name: str
    heading: str
    flags: tuple[str, ...]
    envs: tuple[str, ...]
    file: str
    default: object
    parse: Reading[Any]
    help: str

    @property
    def switch(self) -> bool:
        """Whether the flag may be given without a value."""
        return self.parse in (values.boolean, values.boolean_or_auto)

    @property
    def many(self) -> bool:
        """Whether the flag may be repeated: its value is a list."""
        return any(form.get("type") == "array" for form in self.parse.schema.get("anyOf", ()))


_declared: list[Option] = []


def option(
    heading: str, file: str, default: object, text: str, *, flags: tuple[str, ...] = (), envs: tuple[str, ...] = ()
) -> Any:
    """Declare an option, and return its default for the field of `Settings`.

    The flag and the environment variable have the name of the field, unless others are given. The field's type is annotated with
    the `Reading` of its values.
    """
    written = ",".join(default) if isinstance(default, tuple) else default
    if isinstance(default, float):
        written = values.spell_duration(default)
    _declared.append(Option("", heading, flags, envs, file, written, values.text, text))
    return default


def declared(settings: type[msgspec.Struct]) -> tuple[Option, ...]:
    """Return the declared options with their names. The first fields are the options' fields, in the same order."""
    return tuple(
        msgspec.structs.replace(
            each,
            name=field.name,
            flags=each.flags or ((field.name.replace("_", "-"),) if each.heading else ()),
            envs=each.envs or (field.name.upper(),),
            parse=get_args(field.type)[1],
        )
        for field, each in zip(msgspec.structs.fields(settings), _declared, strict=False)
    )
