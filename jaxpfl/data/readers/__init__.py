"""Readers of files: an `InputError` names file and row, no value; `CorruptFile` is damage."""
