"""What pydantic finds, in the words of this project: each kind of fault, and nothing of pydantic's own text."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from lake.errors import UsageError
from lake.settings import NAME, describe_faults, validate


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: tuple[str, ...] = ()


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field("a", pattern=NAME, max_length=5)
    word: str = Field("b", pattern="^[a-d]+$", min_length=1)
    share: float = Field(0.5, gt=0, lt=1)
    exact: float = Field(1.0, strict=True)
    on: bool = True
    count: int = 1
    either: float | Literal["answer"] = 1.0
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] = Cat()
    pets: tuple[Annotated[Cat | Dog, Field(discriminator="kind")], ...] = Field((Cat(),), min_length=1)
    limits: dict[str, int] = {}
    names: tuple[str, ...] | Literal["all"] = "all"

    @model_validator(mode="after")
    def _sound(self) -> "Settings":
        if self.word == "bad":
            msg = "bad is no word"
            raise ValueError(msg)
        return self


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"name": "../x"}, "`name` is '../x'; valid: letters, digits, `_`, `.` and `-`, beginning with a letter or a "),
        ({"name": "abcdef"}, "`name` is 'abcdef'; valid: at most 5 characters"),
        ({"word": "x"}, "`word` is 'x'; valid: a text that matches ^[a-d]+$"),
        ({"word": ""}, "`word` is ''; valid: at least 1 characters"),
        ({"word": 3}, "`word` is 3; valid: a text"),
        ({"word": "bad"}, "bad is no word"),
        ({"share": 1}, "`share` is 1; valid: less than 1.0"),
        ({"share": 0}, "`share` is 0; valid: more than 0.0"),
        ({"share": "half"}, "`share` is 'half'; valid: a number"),
        ({"share": float("nan")}, "`share` is nan; valid: a finite number"),
        ({"exact": "1"}, "`exact` is '1'; valid: a number, not a text"),
        ({"on": "perhaps"}, "`on` is 'perhaps'; valid: true or false"),
        ({"count": 1.5}, "`count` is 1.5; valid: a whole number"),
        ({"count": "x"}, "`count` is 'x'; valid: a whole number"),
        ({"either": "x"}, "`either` is 'x'; valid: a number or 'answer'"),
        ({"pet": {"kind": "cow"}}, "`pet` has the kind 'cow'; valid: 'cat', 'dog'"),
        ({"pet": {}}, "`pet` is {}; valid: keys with values, 'kind' among them"),
        ({"pet": 3}, "`pet` is 3; valid: keys with values"),
        ({"pet": '{"kind": '}, "`pet` is not JSON: Expecting value at character 10 of '{\"kind\": '"),
        ({"limits": "[" * 99_999}, "`limits` is not JSON: it is nested too deeply"),
        ({"pets": []}, "`pets` is []; valid: at least 1"),
        ({"pets": 3}, "`pets` is 3; valid: a list"),
        ({"pets": [{"kind": "cat", "lives": 0}]}, "`pets.0.cat.lives` is 0; valid: 1 or more"),
        ({"pets": [{"kind": "cat", "lives": 10}]}, "`pets.0.cat.lives` is 10; valid: 9 or less"),
        ({"limits": {"a": "x"}}, "`limits.a` is 'x'; valid: a whole number"),
        ({"limits": 1}, "`limits` is 1; valid: keys with values"),
        ({"names": 3}, "`names` is 3; valid: a list or 'all'"),
        ({"colour": "red"}, "there is no option `colour`"),
        ({"count": "x" * 99}, f"`count` is '{'x' * 59}...; valid: a whole number"),
        ({"count": "x", "colour": 1}, "`count` is 'x'; valid: a whole number; there is no option `colour`"),
    ],
)
def test_a_fault_names_the_field_what_it_is_and_what_is_valid(settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ValidationError) as error:
        Settings.model_validate(settings)
    faults = describe_faults(error.value)
    assert faults.startswith(fragment)
    assert not any(word in faults for word in ("Value error", "Input should", "pydantic", "validation", "``"))


def test_what_is_missing_and_text_that_is_no_json() -> None:
    class Needy(BaseModel):
        size: int

    with pytest.raises(ValidationError) as missing:
        Needy.model_validate({})
    assert describe_faults(missing.value) == "`size` is missing"
    with pytest.raises(ValidationError) as broken:
        TypeAdapter(Needy).validate_json("{")
    assert describe_faults(broken.value).startswith("it is not JSON: EOF while parsing")


def test_a_fault_of_a_kind_that_is_not_listed_is_told_in_pydantics_words() -> None:
    class Timed(BaseModel):
        days: list[bytes]

    with pytest.raises(ValidationError) as error:
        Timed.model_validate({"days": [3]})
    assert describe_faults(error.value) == "`days.0` is 3: input should be a valid bytes"


class Bird(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["bird"] = "bird"
    wings: int = Field(2, ge=1)
    home: Settings = Settings()


class Fish(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["fish"] = "fish"
    fins: int = 5


class House(BaseModel):
    model_config = ConfigDict(extra="forbid")

    settings: Settings = Settings()
    maybe: Settings | None = None
    several: tuple[Settings, ...] = ()
    pet: Annotated[Bird | Fish, Field(discriminator="kind")] = Bird()
    pets: tuple[Annotated[Bird | Fish, Field(discriminator="kind")], ...] = ()


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"setings": {}}, "there is no option `setings`; valid: settings"),
        ({"roof": 1}, "there is no option `roof`; valid: settings, maybe, several, pet, pets"),
        ({"settings": {"nam": "a"}}, "there is no option `settings.nam`; valid: name"),
        ({"maybe": {"shar": 1}}, "there is no option `maybe.shar`; valid: share"),
        ({"several": [{"wordy": "a"}]}, "there is no option `several.0.wordy`; valid: word"),
        ({"settings": {"zzz": 1}}, "there is no option `settings.zzz`; valid: name, word, share, exact, on, count, "),
        ({"pet": {"kind": "fish", "wings": 2}}, "there is no option `pet.wings` of fish; valid: kind, fins"),
        ({"pet": {"kind": "bird", "wing": 2}}, "there is no option `pet.wing` of bird; valid: wings"),
        ({"pet": {"kind": "bird", "home": {"x": 2}}}, "there is no option `pet.home.x`; valid: name, word"),
        ({"pet": {"kind": "bird", "wings": 0}}, "`pet.wings` is 0; valid: 1 or more"),
        ({"pets": [{"kind": "bird", "wings": 0}]}, "`pets.0.bird.wings` is 0; valid: 1 or more"),
        ({"pets": [{"kind": "fish", "wings": 0}]}, "there is no option `pets.0.fish.wings`; valid: kind, fins"),
        ({"maybe": {"on": 3.5}, "roof": 1}, "`maybe.on` is 3.5; valid: true or false; there is no option `roof`"),
    ],
)
def test_an_option_that_there_is_not_is_told_with_those_that_there_are(settings: dict[str, Any], fragment: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(House, settings, "house: ")
    assert str(error.value).startswith(f"house: {fragment}")


def test_what_is_right_is_the_configuration() -> None:
    assert validate(House, {"maybe": {"count": "3"}}) == House(maybe=Settings(count=3))
