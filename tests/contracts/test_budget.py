"""Budgets: what is read, what is refused and what the refusal says."""

import math

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qevict.contracts.budget import Budget, Bytes, Fraction, Tokens, parse_budget, to_budget
from qevict.errors import BudgetError, PolicyError, QevictError


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20 %", Fraction(0.2)),
        ("20%", Fraction(0.2)),
        ("0.5 %", Fraction(0.005)),
        ("0.2", Fraction(0.2)),
        (".2", Fraction(0.2)),
        ("2e-1", Fraction(0.2)),
        ("100 %", Fraction(1)),
        ("1", Fraction(1)),
        ("64 MiB", Bytes(64 * 2**20)),
        ("64mib", Bytes(64 * 2**20)),
        ("64 MB", Bytes(64_000_000)),
        ("1.5 KiB", Bytes(1536)),
        ("3 kB", Bytes(3000)),
        ("2 GiB", Bytes(2**31)),
        ("2 GB", Bytes(2_000_000_000)),
        ("7 B", Bytes(7)),
        ("512 tokens", Tokens(512)),
        ("  512   Tokens ", Tokens(512)),
        ("1 token", Tokens(1)),
    ],
)
def test_text_is_read(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget
    assert to_budget(text) == budget


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "%",
        "twenty %",
        "20 percent",
        "20 %%",
        "-20 %",
        "- 1 B",
        "+",
        "1,000 tokens",
        "0x10 B",
        "nan",
        "inf %",
        "None",
    ],
)
def test_text_that_is_no_budget_is_refused_with_the_allowed_forms(text: str) -> None:
    with pytest.raises(BudgetError, match=r"allowed: a share such as '20 %'.*'64 MiB'.*'512 tokens'.*None") as caught:
        parse_budget(text)
    assert repr(text) in str(caught.value) or repr(text.strip(" 0123456789")) in str(caught.value)


def test_an_unknown_unit_is_named() -> None:
    with pytest.raises(BudgetError, match=r"unknown budget unit 'parsecs' in '3 parsecs'.*allowed"):
        parse_budget("3 parsecs")


@pytest.mark.parametrize("text", ["0 %", "0", "0.0", "0 B", "0 tokens", "0.4 B", "1e-400"])
def test_amounts_that_come_to_nothing_are_refused(text: str) -> None:
    with pytest.raises(BudgetError, match="must be positive"):
        parse_budget(text)


def test_parts_of_a_token_are_refused() -> None:
    with pytest.raises(BudgetError, match="whole number"):
        parse_budget("1.9 tokens")


def test_a_number_without_a_unit_is_told_the_units() -> None:
    with pytest.raises(BudgetError, match="'20' has no unit, and a share is at most 1: write '20 %'"):
        parse_budget("20")
    assert parse_budget("0.2") == Fraction(0.2)


@pytest.mark.parametrize("text", ["100.1 %", "1e400 %"])
def test_shares_above_one_are_refused(text: str) -> None:
    with pytest.raises(BudgetError, match=r"at most 1|must be positive"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["1e400 B", "1e400 tokens", "1e308 GiB"])
def test_amounts_beyond_any_number_are_refused_too(text: str) -> None:
    with pytest.raises(BudgetError):
        parse_budget(text)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("budget", [Fraction, Bytes, Tokens])
@pytest.mark.parametrize("amount", [0, -1, -0.5, math.nan, math.inf, -math.inf, True, "8", None])
def test_amounts_that_are_not_positive_numbers_are_refused(budget: type[Budget], amount: float) -> None:
    with pytest.raises(BudgetError, match=r"must be positive, got (share|count)=.*allowed"):
        budget(amount)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [1.0000001, 1.5, 20])
def test_a_share_above_one_names_the_way_to_have_no_limit(share: float) -> None:
    with pytest.raises(BudgetError, match="budget=None"):
        Fraction(share)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [20, 0.2, True, 1, ("20 %",), b"20 %", Fraction, 0])
def test_bare_numbers_and_other_things_are_refused(value: object) -> None:
    """20 and 0.2 would both be guesses: of percent, of bytes, of tokens."""
    with pytest.raises(BudgetError, match=r"Fraction, Bytes, Tokens or text, got .*allowed"):
        to_budget(value)  # type: ignore[arg-type]


def test_none_and_budgets_pass_unchanged() -> None:
    assert to_budget(None) is None
    for budget in (Fraction(0.2), Bytes(5), Tokens(7)):
        assert to_budget(budget) is budget


def test_budget_errors_can_be_caught_as_policy_errors_and_value_errors() -> None:
    assert issubclass(BudgetError, PolicyError)
    assert issubclass(BudgetError, QevictError)
    assert issubclass(BudgetError, ValueError)


@given(st.integers(1, 100), st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_share_never_grants_more_than_its_part_and_grows_with_the_row(
    percent: int, tokens: int, token_bytes: int
) -> None:
    budget = Fraction(percent / 100)
    granted = budget.row_bytes(tokens, token_bytes)
    assert isinstance(granted, int)
    assert abs(granted - percent * tokens * token_bytes / 100) <= 1
    assert granted <= tokens * token_bytes
    assert granted <= budget.row_bytes(tokens + 1, token_bytes)


@given(st.integers(1, 10**12), st.integers(0, 10**6), st.integers(1, 10**6))
def test_absolute_budgets_do_not_follow_the_row(count: int, tokens: int, token_bytes: int) -> None:
    assert Bytes(count).row_bytes(tokens, token_bytes) == count
    assert Tokens(count).row_bytes(tokens, token_bytes) == count * token_bytes


@given(
    st.one_of(
        st.integers(1, 1000).map(lambda permille: Fraction(permille / 1000)),
        st.integers(1, 2**70).map(Bytes),
        st.integers(1, 2**70).map(Tokens),
    )
)
def test_what_a_budget_prints_can_be_read_again(budget: Budget) -> None:
    again = parse_budget(str(budget))
    if isinstance(budget, Fraction):
        assert isinstance(again, Fraction)
        assert again.share == pytest.approx(budget.share, rel=1e-6)
    else:
        assert again == budget


def test_budgets_are_frozen_values() -> None:
    assert Fraction(0.2) == Fraction(0.2)
    assert hash(Bytes(5)) == hash(Bytes(5))
    assert len({Bytes(5), Bytes(5), Tokens(5)}) == 2
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Bytes(5).count = 6  # type: ignore[misc]
