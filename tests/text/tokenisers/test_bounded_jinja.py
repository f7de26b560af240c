"""Templates of strangers: whatever one computes, it ends, in bounded memory, with a sentence."""

import datetime
import signal

import psutil
import pytest

from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers import bounded_jinja


def fill_in(source, variables):
    (found,) = bounded_jinja.fill_in(source, [variables])
    return found


LOOP = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


def test_a_template_that_computes_for_long_is_ended():
    """TRUST 39: this one would end by itself, after 10^8 steps."""
    with pytest.raises(InputError, match="^it computes for more than 1 s$"):
        fill_in(LOOP, {})
    assert fill_in("{{ a }}", {"a": "\ud800ä"}) == "\ud800ä"


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d", "%A %H:%M"])
def test_the_present_is_the_same_on_any_day(form):
    """Of a template that asks for it, whether or not it has a date of its own to fall back on."""
    plain = f"{{{{ strftime_now('{form}') }}}}"
    careful = f"{{% if strftime_now is defined %}}{plain}{{% else %}}none{{% endif %}}"
    expected = datetime.datetime(2024, 7, 26).strftime(form)
    assert [fill_in(source, {}) for source in (plain, careful)] == [expected] * 2


def test_a_template_that_takes_much_memory_is_refused():
    """TRUST 39: 1.2 GB, which most machines have."""
    with pytest.raises(InputError, match="^it takes more than 1,024 MiB of memory$"):
        fill_in("{{ ('a' * 1200000000)|length }}", {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** (10 ** 9) }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 'a'|center(10 ** 10) }}",
        "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
        "{% if a == 'x' %}{{ 'a' * 10 ** 10 }}{% endif %}",
    ],
    ids=["power", "doubling", "width", "filter", "text", "recursion", "brackets", "one message"],
)
def test_no_template_takes_more_than_its_share(source):
    """TRUST 39: whatever it tries; the message is half a sentence."""
    with pytest.raises(InputError) as caught:
        fill_in(source, {"a": "x"})
    assert 10 < len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_each_text_has_its_own_share():
    """Of time, too: together these take longer than the limit for one."""
    work = "{% for a in range(9999) %}{% for b in range(n) %}{% endfor %}{% endfor %}{{ n }}"
    numbers = [{"n": 240 + i} for i in range(5)]
    assert bounded_jinja.fill_in(work, numbers) == [str(each["n"]) for each in numbers]
    with pytest.raises(InputError, match="no 3"):
        bounded_jinja.fill_in(
            "{% if n == 3 %}{{ raise_exception('no 3') }}{% endif %}", [{"n": n} for n in range(9)]
        )
    assert bounded_jinja.fill_in("a", []) == []


def test_an_interrupt_ends_the_process():
    def interrupt(*_):
        raise KeyboardInterrupt

    # Other tests of this process may have left children of their own, as resource trackers are.
    others = psutil.Process().children()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            fill_in(LOOP, {})
    finally:
        signal.signal(signal.SIGALRM, before)
    assert set(psutil.Process().children()) <= set(others)
