"""Words as sequences of bytes."""
