"""Section: one frozen, validated part of a run's settings, and the plain words for what is wrong with it.

Owns how settings are declared and how mistakes are told. Does not own any setting: each lives beside the code that
uses it. Unknown fields are refused with the nearest known name; nothing is clamped or ignored.

    class TrainConfig(Section):
        lr: float = Field(1e-6, gt=0)

    TrainConfig(lr=-1)   ->  pydantic.ValidationError, which `explain` turns into
    train.lr must be greater than 0, got -1. Change it in quickstart.py.

A field's validator raises `ValueError("must <rule>, got <value>. <what to do>")`: its path is put in front. A rule between two
settings writes the whole sentence, which stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rondo.runtime.errors import ConfigError, closest, did_you_mean
from rondo.runtime.reference import as_reference

_REFERENCE = BeforeValidator(as_reference)
FunctionRef = Annotated[str, _REFERENCE]
"""A function in the settings: given as the function itself or as 'module:function' / 'file.py:function', kept as text."""


@dataclass(frozen=True, slots=True)
class OnResume:
    """Marks what a run that goes on may do with a setting, beside its definition: `Annotated[int, FREE]`. All settings of a
    section that is marked have its mark; one without any is `LEARNT`."""

    kind: Literal["free", "length", "learnt", "fixed"]
    why: str = ""
    """Of one that stays as it is."""


FREE = OnResume("free")
"""May change: it does not say what is learnt."""
LENGTH = OnResume("length")
"""Says how long a run is: may change, unless a learning rate falls until the last step."""
LEARNT = OnResume("learnt")
"""Changes what is learnt from there on, and is to be accepted."""


def fixed(why: str) -> OnResume:
    """Stays as it is: `why` what was trained cannot be used with another value."""
    return OnResume("fixed", why)


_SHOWN_CHARACTERS = 80
_SHOWN_NAMES = 12
_Model = TypeVar("_Model", bound=BaseModel)
_keep: ContextVar[Callable[[type[Section], Exception], bool] | None] = ContextVar("keep", default=None)
_UNCHECKED = "_unchecked"


class _Unchecked(ValueError):
    """Why a section is invalid that holds an invalid one, whose reasons are kept."""


class Section(BaseModel):
    """Base of all settings. Frozen, refuses unknown fields, checks defaults too; `model_copy` is not for changing it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )
    aliases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Of the root of a tree: names that other libraries use -> paths of the settings that each may mean."""
    remarks: ClassVar[Mapping[str, str]] = {}
    """Of the root of a tree: path of a setting -> what is added where it is suggested for a name of another library."""
    place: ClassVar[str] = ""
    """Where rules between settings of this section say that it stands; `explain` puts the place in, where it stands elsewhere."""

    def __init__(self, /, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except Exception as error:
            keep = _keep.get()
            if keep is None or not keep(type(self), error):
                raise
            unchecked = self.model_construct(**settings)
            unchecked.__dict__[_UNCHECKED] = True
            for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__"):
                object.__setattr__(self, name, getattr(unchecked, name))

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # for sections below others it is not called

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_a_truth(cls, value: Any, info: ValidationInfo) -> Any:
        # Else True would become 1.0.
        leaves = list(_leaves(cls.model_fields[str(info.field_name)].annotation))
        if _holds_truth(value) and not {int, float}.isdisjoint(leaves) and bool not in leaves:
            raise ValueError(f"must be a number, got {show_value(value)}. Write the number")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if _UNCHECKED in self.__dict__:
            raise _Unchecked
        self.derive()
        texts = []
        try:
            for text in self.refused():
                texts.append(text)
        except Exception:  # a rule may rely on those before it
            if not texts:
                raise
        if texts:
            raise ValueError("\n".join(texts))
        return self

    def derive(self) -> None:
        """Fills in what follows from other settings, past pydantic: the fields stay "not set", so that with other settings they
        are derived anew."""

    def refused(self) -> Iterator[str]:
        """The rules between settings that these break, a whole sentence each. A rule may rely on those before it."""
        yield from ()

    def changed(self, *names: str) -> dict[str, Any]:
        """Of these settings those that are not what they are by default, with their values."""
        default = {name: type(self).model_fields[name].get_default(call_default_factory=True) for name in names}
        return {name: value for name in names if (value := getattr(self, name)) != default[name]}


@contextmanager
def keeping_errors(keep: Callable[[type[Section], Exception], bool]) -> Iterator[None]:
    """In the body, call `keep` with a section that is invalid and the reason. If it returns True, the body goes on with that
    section unchecked, so that mistakes of several sections are found at once; a section that holds it is invalid too."""
    token = _keep.set(keep)
    try:
        yield
    finally:
        _keep.reset(token)


def references(section: BaseModel) -> list[tuple[str, str]]:
    """(path, reference) of every function in the settings, in the order of the tree."""
    found: list[tuple[str, str]] = []

    def collect(path: str, reference: str) -> str:
        found.append((path, reference))
        return reference

    with_references(section, collect)
    return found


def with_references(section: _Model, change: Callable[[str, str], str], prefix: str = "") -> _Model:
    """The same settings with `change(path, reference)` in the place of every reference to a function."""
    changes = {}
    for name, field in type(section).model_fields.items():
        value, is_function = getattr(section, name), _REFERENCE in field.metadata or _takes_function(field.annotation)
        made = _changed(value, is_function, f"{prefix}{name}", change)
        if made is not value:
            changes[name] = made
    return section.model_copy(update=changes) if changes else section


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that is another one than it was."""

    path: str
    was: Any
    now: Any
    on_resume: OnResume

    def __str__(self) -> str:
        return f"{self.path} was {show_value(self.was)}, and is {show_value(self.now)}"


def changes(before: Any, after: Any, on_resume: OnResume | None = None, path: str = "") -> Iterator[Change]:
    """Every setting that differs between two trees of settings, with what a resume may do with it."""
    if isinstance(before, Section) and type(before) is type(after):
        for name, field in type(before).model_fields.items():
            mark = on_resume or next((each for each in field.metadata if isinstance(each, OnResume)), None)
            yield from changes(getattr(before, name), getattr(after, name), mark, f"{path}.{name}".lstrip("."))
    elif isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            yield from changes(before.get(name), after.get(name), on_resume, f"{path}.{name}")
    elif before != after:
        yield Change(path, before, after, on_resume or LEARNT)


def explain(
    error: ValidationError,
    source: str,
    prefix: str = "",
    root: type[BaseModel] | None = None,
    *,
    together: bool = True,
) -> ConfigError:
    """Return all mistakes of `error`, one line each. `source` says where to change them; `prefix` is the path of the section
    below `root`, by default the section itself. together: also those between the fields of the section."""
    title = _section_named(error.title)
    root = root or title
    items = error.errors()
    # A misspelt name leaves the right one missing: that is one mistake.
    meant = {(*item["loc"][:-1], name) for item in items for name in _meant(item, title, root)}
    lines = []
    for item in items:
        if (item["type"] == "missing" and item["loc"] in meant) or not (together or item["loc"]):
            continue
        if isinstance(item.get("ctx", {}).get("error"), _Unchecked):
            continue
        names = _path(item, title)
        path = ".".join([prefix, *names] if prefix else names) or error.title
        text = _sentence(path, item, title, root, source)
        owner = _owner((*item["loc"], ""), title)
        place = owner.place if owner is not None and issubclass(owner, Section) else ""
        lines.append(settings_at(path, text, place) if item["type"] != "extra_forbidden" else text)
    return ConfigError("\n".join(dict.fromkeys(lines)))


def settings_at(path: str, text: str, place: str) -> str:
    """The sentence with settings that it names at `place` named where they are: data.prompt as sft.data.prompt, say."""
    return re.sub(rf"(?<![\w./]){place}\.(?=[a-z])", f"{path}.", text) if place and path != place else text


def may_hold_secret(url: str) -> bool:
    """Whether something stands in front of an @, or behind a ? or #, where keys are written. Settings are saved and shown."""
    return "@" in url.partition("://")[2].partition("/")[0] or "?" in url or "#" in url


def nearest(name: str, known: list[str]) -> str:
    """ "Did you mean 'x'?" when a known name is near, else the list of known names."""
    return did_you_mean(name, known, f"Known: {', '.join(sorted(known))}.")


def nearest_field(name: str, owner: type[BaseModel], root: type[BaseModel] | None) -> str:
    """Return the advice about a name that `owner` does not have: "Did you mean 'train.lr'?"."""
    meant = _suggestions(name, owner, root)
    if meant:
        tree = root if root is not None and issubclass(root, Section) else Section
        remarks = [
            tree.remarks[path]
            for path in tree.aliases.get(name, ())
            if path in tree.remarks and {path, path.rpartition(".")[2]} & {*meant}
        ]
        return " ".join([f"Did you mean {' or '.join(map(repr, meant[:4]))}?", *(f"{remark}." for remark in remarks)])
    if root is not None and len(owner.model_fields) > _SHOWN_NAMES:
        return "`rondo show --schema` lists all settings."
    return f"Known: {', '.join(sorted(owner.model_fields))}."


def parts_of(annotation: Any) -> list[Any]:
    """The types that an annotation allows, without None and what is said about them."""
    if get_origin(annotation) is Annotated:
        return parts_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [part for each in get_args(annotation) for part in parts_of(each)]
    return [] if annotation is type(None) else [annotation]


def show_value(value: object) -> str:
    """A value as text, cut to one short line."""
    text = value.__name__ if isinstance(value, FunctionType) else repr(value).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def sections(root: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """(path, type) of every section of the tree, those above first."""
    pending: list[tuple[str, type[BaseModel]]] = [("", root)]
    for path, owner in pending:
        yield path, owner
        for name in owner.model_fields:
            if (below := field_section(owner, name)) is not None:
                pending.append((f"{path}.{name}".lstrip("."), below))


def field_section(owner: type[BaseModel], name: str) -> type[Section] | None:
    """The section type that a field of `owner` holds (also inside a tuple or an option), or None."""
    field = owner.model_fields.get(name)
    return next(_sections_in(field.annotation), None) if field is not None else None


def _changed(value: Any, is_function: bool, path: str, change: Callable[[str, str], str]) -> Any:
    if isinstance(value, BaseModel):
        return with_references(value, change, f"{path}.")
    if isinstance(value, str):
        return change(path, value) if is_function and ":" in value else value
    if isinstance(value, tuple):
        made = tuple(_changed(item, is_function, f"{path}.{i}", change) for i, item in enumerate(value))
        return made if any(new is not old for new, old in zip(made, value, strict=True)) else value
    if isinstance(value, dict):
        by_name = {name: _changed(item, is_function, f"{path}.{name}", change) for name, item in value.items()}
        return by_name if any(by_name[name] is not value[name] for name in value) else value
    return value


def _takes_function(annotation: Any) -> bool:
    return _REFERENCE in getattr(annotation, "__metadata__", ()) or any(map(_takes_function, get_args(annotation)))


def _suggestions(name: str, owner: type[BaseModel], root: type[BaseModel] | None) -> list[str]:
    """Return the settings that an unknown name in `owner` may mean, best first: names of its fields, or paths below `root`."""
    fields, words = list(owner.model_fields), set(name.split("_"))
    aliases = root.aliases if root is not None and issubclass(root, Section) else {}
    if name in aliases:
        names = [path.rpartition(".")[2] for path in aliases[name]]
        return [each for each in names if each in fields][:1] or list(aliases[name])
    below = [(path, field) for path, section in sections(root) for field in section.model_fields] if root else []
    near = closest(name, fields)
    own = [near] if near is not None else [field for field in fields if words <= set(field.split("_"))]
    near = name if own else closest(name, {field for _, field in below} | aliases.keys())
    if near is not None and near in aliases:
        return _suggestions(near, owner, root)
    return own + [f"{path}.{field}".lstrip(".") for path, field in below if field == near][:3]


def _sentence(path: str, item: Any, title: type[Section] | None, root: type[BaseModel] | None, source: str) -> str:
    kind, value = item["type"], show_value(item["input"])
    where = f"Change it in {source}."
    if kind == "extra_forbidden":
        owner = _owner(item["loc"], title)
        name = str(item["loc"][-1])
        hint = nearest_field(name, owner, root) if owner is not None else where
        label = owner.__name__ if owner is not None else "its section"
        return f"{path} must be a field of {label}, got an unknown name. {hint}"
    if kind == "missing":
        return f"{path} must be set, got nothing. Set it in {source}."
    if kind in ("value_error", "assertion_error"):
        texts = [
            f"{path} {text}" if text.startswith("must ") else text for text in str(item["ctx"]["error"]).split("\n")
        ]
        return "\n".join(text if text.endswith((".", "?")) else f"{text}." for text in texts)
    if kind == "model_type":
        name = item["ctx"]["class_name"]
        return f"{path} must be a {name}, got {value}. Set its fields: {path.rpartition('.')[2]}={name}(...)."
    _, should, rule = item["msg"].partition(" should ")
    if not should:
        return f"{path} must be valid, got {value} ({item['msg']}). {where}"
    rule = re.split(r" after validation|, unable to|, got |, not ", rule)[0].replace("a valid tuple", "a list")
    if kind == "tuple_type" and isinstance(item["input"], str):
        where = f"Write [{value}]."
    if isinstance(item["input"], FunctionType):
        owner, function = _owner(item["loc"], title), item["input"].__name__
        field = owner.model_fields.get(str(item["loc"][-1])) if owner is not None else None
        is_function = field is not None and _takes_function(field.annotation)
        where = f"Write ({function},)." if is_function else f"Call it: {function}()."
    return f"{path} must {rule}, got {value}. {where}"


def _meant(item: Any, title: type[Section] | None, root: type[BaseModel] | None) -> list[str]:
    """Return the settings that an unknown name may mean; none for another kind of mistake."""
    owner = _owner(item["loc"], title) if item["type"] == "extra_forbidden" else None
    return _suggestions(str(item["loc"][-1]), owner, root) if owner is not None else []


def _path(item: Any, title: type[Section] | None) -> list[str]:
    """The names and indices on the way to a mistake; pydantic's tags for the branches of a union are left out."""
    names: list[str] = []
    owner: type[BaseModel] | None = title
    by_name = False  # sections under names of the user's
    for part in item["loc"]:
        known = title is None or (
            owner is not None and (part in owner.model_fields or item["type"] == "extra_forbidden")
        )
        if isinstance(part, int):
            names.append(str(part))
        elif by_name:
            names.append(part)
            by_name = False
        elif known:
            names.append(part)
            field = owner.model_fields.get(part) if owner is not None else None
            owner = field_section(owner, part) if owner is not None else None
            by_name = owner is not None and field is not None and get_origin(field.annotation) is dict
    return names


def _owner(loc: tuple[int | str, ...], title: type[Section] | None) -> type[BaseModel] | None:
    owner: type[BaseModel] | None = title
    for part in loc[:-1]:
        if owner is not None and isinstance(part, str) and part in owner.model_fields:
            owner = field_section(owner, part)
    return owner


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types of the plain values that an annotation allows, at any depth."""
    for part in parts_of(annotation):
        inside = get_args(part) if get_origin(part) in (dict, tuple, list) else ()
        yield from (leaf for each in inside for leaf in _leaves(each)) if inside else (part,)


def _holds_truth(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_holds_truth, inside))


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections_in(argument)


def _section_named(name: str) -> type[Section] | None:
    pending: list[type[Section]] = [Section]
    while pending:
        found = pending.pop()
        if found.__name__ == name:
            return found
        pending.extend(found.__subclasses__())
    return None
