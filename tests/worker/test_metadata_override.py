from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamaq.common.errors import InvalidSettings
from llamaq.worker.metadata_override import MAX_BYTES, MAX_INT64, MetadataOverride
from llamaq.worker.settings import load_settings

VALUES = (
    st.booleans()
    | st.integers(-MAX_INT64, MAX_INT64)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=MAX_BYTES // 4)
)


@given(VALUES)
def test_an_override_is_read_as_it_is_written(value: bool | float | str) -> None:
    override = MetadataOverride("general.name", value)
    assert MetadataOverride.parse(str(override)) == override


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("general.name", "is not KEY=TYPE:VALUE with one of the types int, float, bool, str"),
        ("=int:1", "is not KEY=TYPE:VALUE"),
        ("key=int", "is not KEY=TYPE:VALUE"),
        ("key=u32:1", "is not KEY=TYPE:VALUE"),
        ("key=int:1.5", "key: '1.5' is not a valid int"),
        (f"key=int:{2**63}", "is not a valid int"),
        ("key=float:nan", "key: 'nan' is not a valid float"),
        ("key=bool:1", "key: '1' is not a valid bool"),
        ("k" * 128 + "=int:1", "at most 127 bytes"),
        ("key=str:" + "ä" * 64, "at most 127 bytes"),
        ("key=int:1,key=int:2", "a key is listed twice"),
    ],
)
def test_a_bad_override_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidSettings, match=f"--override-kv.*{message}"):
        load_settings(override_kv=text)


def test_overrides_are_separated_by_commas() -> None:
    settings = load_settings(override_kv="a.b=bool:true, c=str:x=y:z")
    assert settings.metadata_overrides == (MetadataOverride("a.b", True), MetadataOverride("c", "x=y:z"))
