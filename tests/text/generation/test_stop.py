from hypothesis import given
from hypothesis import strategies as st

from jaxpfl.text.generation.decoding import cut, stop_table

TOKENS = tuple(
    piece.encode() for piece in ("a", "b", "ab", "ba", "aab", "é", "bé", "abab", "", "x")
) + (b"\xc3", b"\xa9", b"\xa9a")
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3)
IDS = st.lists(st.integers(0, len(TOKENS) - 1), max_size=12)


def run(table, ids):
    """How many tokens are read up to and with the one that ends the text, or None."""
    state = 0
    for count, token in enumerate(ids, 1):
        state = int(table[state, token])
        if state == len(table) - 1:
            return count
    return None


def as_text(ids):
    return b"".join(TOKENS[i] for i in ids).decode("utf-8", "replace")


@given(STOPS, IDS)
def test_a_text_ends_with_the_token_that_completes_a_stop_string(stops, ids):
    """Against searching the decoded text after every token."""
    table = stop_table(tuple(stops), TOKENS)
    found = next(
        (n for n in range(1, len(ids) + 1) if any(stop in as_text(ids[:n]) for stop in stops)), None
    )
    assert run(table, ids) == found


@given(STOPS, IDS)
def test_the_text_is_cut_where_the_first_complete_stop_string_begins(stops, ids):
    """Against the shortest beginning of the text that holds one."""
    text = as_text(ids)
    expected = text
    for end in range(len(text) + 1):
        begins = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if begins:
            expected = text[: min(begins)]
            break
    content = b"".join(TOKENS[i] for i in ids)
    assert cut(content, stops).decode("utf-8", "replace") == expected
