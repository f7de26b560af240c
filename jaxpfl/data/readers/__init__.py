"""Readers of files. Whatever is wrong with one is an `InputError` that names the file, the row or
client and what was expected, and no value; what is truncated or altered is a `CorruptFile`."""
