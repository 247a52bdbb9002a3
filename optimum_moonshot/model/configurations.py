"""The sizes in a model's configuration, and changing them."""

from collections.abc import Iterator

from transformers import PreTrainedConfig

Edit = dict[str, int]  # field of a configuration ("text_config.ffn_dim" where it is nested) → new value


def whole_numbers(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, int | None]]:
    """The fields of a configuration and its nested ones that are integers or None.

    Args:
        config: to search.
        prefix: of the names, such as "text_config.".
    """
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            yield from whole_numbers(inner, f"{prefix}{name}.")
        elif value is None or type(value) is int:
            yield prefix + name, value


def edited(config: PreTrainedConfig, edit: Edit) -> PreTrainedConfig:
    """A copy of the configuration with some fields changed, validated as if loaded from a file.

    Args:
        config: to copy.
        edit: the new values.
    """
    values = config.to_dict()
    for path, value in edit.items():
        *parents, name = path.split(".")
        owner = values
        for parent in parents:
            owner = owner[parent]
        owner[name] = value
    return type(config).from_dict(values)
