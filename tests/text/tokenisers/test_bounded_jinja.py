"""Templates of strangers: whatever one computes, it ends, in bounded memory, with a sentence."""

import signal
import threading

import pytest

from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers.bounded_jinja import fill_in

LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


def test_a_template_that_computes_for_long_is_ended():
    """TRUST 39: this one would end by itself, after 10^8 steps."""
    with pytest.raises(InputError, match="^it computes for more than 1 s$"):
        fill_in(LOOP, {})
    # Others are filled in, by another process.
    assert fill_in("{{ a }}", {"a": "\ud800ä"}) == "\ud800ä"


def test_a_template_that_takes_much_memory_is_refused():
    """TRUST 39: 1.2 GB, which most machines have."""
    with pytest.raises(InputError, match="^it takes more than 1,024 MiB of memory$"):
        fill_in("{{ ('a' * 1200000000)|length }}", {})


BOMBS = {
    "power": "{{ 10 ** (10 ** 9) }}",
    "loops": "{% for a in range(99999) %}" * 9 + "{% endfor %}" * 9,
    "loop that is too long": "{% for a in range(10 ** 9) %}{% endfor %}",
    "list": "{{ [0] * 10 ** 10 }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "width": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:10000000000}'.format(1) }}",
    "method": "{{ 'a'.center(10 ** 10) }}",
    "filter": "{{ 'a'|center(10 ** 10) }}",
    "text": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "one message alone": "{% if a == 'x' %}{{ 'a' * 10 ** 10 }}{% endif %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_no_template_takes_more_than_its_share(name):
    """TRUST 39: the message is half a sentence, and the next template finds a process."""
    with pytest.raises(InputError) as caught:
        fill_in(BOMBS[name], {"a": "x"})
    assert 10 < len(str(caught.value)) < 300 and "\n" not in str(caught.value)
    assert fill_in("{{ a }}b", {"a": "x"}) == "xb"


def test_answers_are_not_mixed_up_by_threads():
    found = {}

    def ask(number: int) -> None:
        found[number] = [fill_in("{{ a }}", {"a": f"{number} {i}"}) for i in range(50)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number} {i}" for i in range(50)] for number in range(4)}


def test_an_interrupt_does_not_shift_the_answers():
    def interrupt(*_):
        raise KeyboardInterrupt

    fill_in("a", {})
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            fill_in(BOMBS["loops"], {})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert fill_in("c", {}) == "c"
