"""tf.train.Example: what an independent encoder writes is read back; damage never passes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpfl.data.readers.tff_examples import DefectError, Feature, decode
from tests.data.tff_files import entry, example, feature, message, varint

SCHEMA = {
    "label": Feature("int32"),
    "long": Feature("int64", (2,)),
    "pixels": Feature("float32", (2, 2)),
    "a_name_of_more_than_16_bytes": Feature("text"),
    "flag": Feature("bool"),
    "gray": Feature("uint8", (3,)),
}
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(width=32)
VALUES = st.fixed_dictionaries(
    {
        "label": st.integers(-(2**31), 2**31 - 1).map(np.int64),
        "long": st.lists(INT64, min_size=2, max_size=2).map(lambda v: np.array(v, np.int64)),
        "pixels": st.lists(FLOAT, min_size=4, max_size=4).map(lambda v: np.array(v, np.float32)),
        "a_name_of_more_than_16_bytes": st.text(max_size=200).map(
            lambda text: text.encode("utf-8", "replace")
        ),
        "flag": st.integers(0, 1),
        "gray": st.lists(st.integers(0, 255), min_size=3, max_size=3),
    }
)


def check(columns, rows):
    assert list(columns) == list(SCHEMA)
    for name, expected in SCHEMA.items():
        column = columns[name]
        if expected.dtype == "text":
            assert [text.encode() for text in column.to_pylist()] == [row[name] for row in rows]
            continue
        wanted = np.array([np.reshape(row[name], expected.shape) for row in rows], expected.dtype)
        assert column.dtype == expected.dtype
        assert column.shape == (len(rows), *expected.shape)
        # Bytes: NaN must stay the same NaN.
        assert column.tobytes() == wanted.tobytes()


@given(st.lists(VALUES, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_round_trip_in_any_order_of_features(rows, random):
    # One order for all, then one for each: the order is learnt, and must not be relied on.
    for shuffled_each in (False, True):
        names = random.sample(list(SCHEMA), len(SCHEMA))
        messages = []
        for row in rows:
            if shuffled_each:
                names = random.sample(names, len(names))
            messages.append(example({name: row[name] for name in names}))
        check(decode(SCHEMA, messages), rows)
        check(decode(SCHEMA, messages[::-1]), rows[::-1])


def test_unknown_fields_and_parts_of_a_message_are_read_as_the_format_says():
    unknown = [message(15, b"later"), varint(8 * 13 + 5) + b"abcd", varint(8 * 12 + 1) + bytes(8)]
    entries = [entry(name, unknown[0] + feature(value)) for name, value in ROW.items()]
    parts = [b"".join(entries[:2]) + unknown[1], b"".join(entries[2:])]
    check(decode(SCHEMA, [unknown[2].join(message(1, p) for p in parts)]), [ROW])
    check(decode(SCHEMA, []), [])
    one, two = (message(1, varint(value)) for value in ROW["long"])
    for split in (message(3, one) + message(3, two), message(3, one + two)):
        check(decode(SCHEMA, [other("long", split)]), [ROW])


def test_a_message_of_millions_of_entries_is_refused_without_reading_them():
    """TRUST 8: two bytes are an entry."""
    hostile = message(1, b"\n\0" * 300_000)
    twice = message(1, entry("x", feature([1])) * 300_000)
    schema = {"x": Feature("int64")}
    tracemalloc.start()
    for content, expected in ((hostile, "not declared"), (twice, 'feature "x" twice')):
        with pytest.raises(DefectError, match=expected):
            decode(schema, [content])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


ROW = {
    "label": 3,
    "long": [-1, 2**40],
    "pixels": np.arange(4, dtype=np.float32),
    "a_name_of_more_than_16_bytes": b"rosebud",
    "flag": 1,
    "gray": [0, 127, 255],
}


@given(st.data())
def test_damage_is_reported_or_changes_a_value_but_nothing_else_happens(data):
    """Any byte changed, cut off or put in: a DefectError of that message, or whole columns."""
    whole = example(ROW)
    at = data.draw(st.integers(0, len(whole) - 1))
    how = data.draw(st.sampled_from(["change", "cut", "insert", "remove"]))
    byte = bytes([data.draw(st.integers(0, 255))])
    damaged = {
        "change": whole[:at] + byte + whole[at + 1 :],
        "cut": whole[:at],
        "insert": whole[:at] + byte + whole[at:],
        "remove": whole[:at] + whole[at + 1 :],
    }[how]
    try:
        columns = decode(SCHEMA, [whole, damaged, whole])
    except DefectError as error:
        assert error.index == 1
        assert "rosebud" not in error.reason
    else:
        for name, column in columns.items():
            assert len(column) == 3
            for row in (0, 2):
                alone = decode(SCHEMA, [whole])[name]
                one = column[row]
                assert one == alone[0] if name.startswith("a_name") else (one == alone[0]).all()


def test_every_cut_is_refused():
    whole = example(ROW)
    for length in range(len(whole)):
        with pytest.raises(DefectError) as caught:
            decode(SCHEMA, [whole, whole[:length]])
        assert caught.value.index == 1
        assert caught.value.corrupt or length == 0


def replaced(**changes):
    return example({**ROW, **changes})


def as_written(*entries) -> bytes:
    """A message of these features, each a name and a value, or what the value is encoded as."""
    return message(1, b"".join(entry(k, v if encoded else feature(v)) for k, v, encoded in entries))


def other(name: str, encoded: bytes) -> bytes:
    """The message with another encoding of one feature."""
    return as_written(*((k, encoded, True) if k == name else (k, v, False) for k, v in ROW.items()))


def integers(content: bytes) -> bytes:
    return message(3, message(1, content))


ALL = [(name, value, False) for name, value in ROW.items()]
DEFECTS = {
    "another kind": (replaced(label=np.float32([1])), '"label" holds floats, expected integers'),
    "too few": (replaced(long=[1]), '"long" does not hold the 2 integers of shape [2]'),
    "too few floats": (replaced(pixels=np.zeros(3, np.float32)), "the 4 floats of shape [2, 2]"),
    "too wide": (replaced(label=2**31), '"label" has a value that does not fit int32'),
    "negative byte": (replaced(gray=[0, -1, 0]), '"gray" has a value that does not fit uint8'),
    "no truth": (replaced(flag=2), '"flag" has a value that does not fit bool'),
    "missing": (as_written(*(each for each in ALL if each[0] != "flag")), 'no feature "flag"'),
    "extra": (replaced(rosebud=1), "a feature that is not declared"),
    "not UTF-8": (replaced(a_name_of_more_than_16_bytes=b"ok \xff"), "byte 4 is not valid UTF-8"),
    "twice": (as_written(*ALL, ("flag", 0, False)), 'it has feature "flag" twice'),
    "twice, instead of another": (
        as_written(*ALL[1:], ("flag", 0, False)),
        'it has feature "flag" twice',
    ),
    "not packed": (
        example(ROW, packed=False),
        "does not hold the 4 floats of shape [2, 2], packed",
    ),
    "two texts of a text": (
        other("a_name_of_more_than_16_bytes", message(1, 2 * message(1, b"a"))),
        "does not hold one byte string",
    ),
    "no feature": (b"", "it has no feature"),
    "length beyond the message": (b"\x0a\x7f" + bytes(5), "truncated"),
    "endless varint": (b"\x0a" + b"\xff" * 11, "truncated"),
    "65 bits": (
        other("label", integers(b"\xff" * 9 + b"\x02")),
        '"label" has a value that does not',
    ),
    "cut varint": (other("label", integers(b"\x80")), "truncated"),
    "empty feature": (message(1, entry("label", b"")), "it has no feature"),
}


@pytest.mark.parametrize("damaged, reason", DEFECTS.values(), ids=DEFECTS)
def test_defects_say_what_is_wrong_and_no_value(damaged, reason):
    with pytest.raises(DefectError) as caught:
        decode(SCHEMA, [example(ROW)] * 3 + [damaged] + [example(ROW)])
    assert caught.value.index == 3
    assert reason in caught.value.reason
    assert "rosebud" not in caught.value.reason
