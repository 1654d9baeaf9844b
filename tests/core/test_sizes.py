from fractions import Fraction

import pytest

from reprise.core.sizes import Bytes, Share, parse_amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("0", Bytes(0)),
        ("1000000", Bytes(1_000_000)),
        ("8GB", Bytes(8 * 10**9)),
        ("8 gb", Bytes(8 * 10**9)),
        ("1.5GiB", Bytes(3 * 2**29)),
        ("512kB", Bytes(512_000)),
        ("25%", Share(Fraction(1, 4))),
        ("100 %", Share(Fraction(1))),
    ],
)
def test_amounts_as_people_write_them(text: str, amount: Bytes | Share) -> None:
    assert parse_amount(text) == amount


@pytest.mark.parametrize("text", ["", "GB", "8G8", "-1GB", "8XB", "120%", "1e9", "٣GB"])
def test_anything_else_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"\.$"):
        parse_amount(text)


def test_a_share_is_of_the_total_and_bytes_are_not() -> None:
    assert parse_amount("25%").of(1000) == 250
    assert parse_amount("10B").of(1000) == 10


@pytest.mark.parametrize(
    "text", ["0", "7", "1kB", "1KiB", "20GB", "3MiB", "1TiB", "25%", "0.1%", "33.3333333333333%", "0%", "100%"]
)
def test_an_amount_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_amount(text)) == text
