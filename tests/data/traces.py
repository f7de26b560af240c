"""What an error holds, and all errors in its chain: also those that a traceback does not show."""


def no_trace(error: BaseException | None, secret: str) -> None:
    """Fails if a client's value is in an error, or in one that it was raised from or during."""
    seen: list[BaseException] = []
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if found is None or found in seen:
            continue
        # Python's own errors hold what they could not read as `object` or `doc`.
        more = [getattr(found, name, None) for name in ("object", "doc")]
        assert secret not in f"{found} {found!r} {vars(found)} {more}", type(found)
        seen.append(found)
        waiting += [found.__cause__, found.__context__]
