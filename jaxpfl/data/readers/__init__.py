"""Readers of files. A fault is an `InputError` that names the file, the row or client and the
expected content, and no value; a truncated or altered file is a `CorruptFile`."""
