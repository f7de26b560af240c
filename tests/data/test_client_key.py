"""Which client a row belongs to, and rules that are refused."""

import pytest

from jaxpfl.data.readers.client_key import ClientKey
from jaxpfl.errors import InputError


@pytest.mark.parametrize(
    ("rule", "value", "client"),
    [
        ("url|domain", "https://www.Example.org:8080/a?b=c#d", "www.example.org"),
        ("url|domain", "http://user:word@news.example.org", "news.example.org"),
        ("url|domain", "no url", None),
        ("url|domain", "http://[", None),
        ("url|domain", 7, None),
        (r"title|re:^(\w+) ", "Cats and dogs", "Cats"),
        (r"title|re:(\d+)", "none", None),
        (r"title|re:a(b)?", "a", None),
        ("who|value", "x", "x"),
        ("who", 7, "7"),
        ("who", "", None),
        ("who", None, None),
        ("who", True, None),
    ],
)
def test_a_rule_gives_the_client_or_none(rule, value, client):
    assert ClientKey.parse(rule, "here")(value) == client


def test_a_hash_deals_to_that_many_clients_and_is_always_the_same():
    key = ClientKey.parse("who|mod:4", "here")
    found = [key(number) for number in range(200)]
    assert set(found) == {"0", "1", "2", "3"}
    assert key("7") == key(7) == found[7]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("url|host", "COLUMN"),
        ("|domain", "COLUMN"),
        ("", "COLUMN"),
        ("url|domain:x", "no argument"),
        ("url|re", "an argument"),
        ("url|re:(", "not a valid regular expression"),
        ("url|re:abc", "must have a group"),
        ("url|mod:0", "a positive number"),
        ("url|mod:x", "a positive number"),
    ],
)
def test_other_rules_are_refused_in_one_sentence(rule, message):
    with pytest.raises(InputError, match=message) as caught:
        ClientKey.parse(rule, "source 'x': client")
    assert str(caught.value).startswith("source 'x': client")
